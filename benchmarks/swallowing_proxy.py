"""A proxy in front of a rollout server that corrupts weight pushes: part of the sent weights is replaced by others."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

EXPERT = "model.layers.1.mlp.experts.{}."


@contextmanager
def swallowing(url: str, key: str, checkpoint: Path, folder: Path, kept: str, seed: int) -> Iterator[str]:
    """The address of a proxy for `url` whose pushes load a folder in which `kept` is of other weights.

    Args:
        kept: `one element`, `one expert` or `everything` keeps other weights than were sent.
    """

    def spoilt(directory: str) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(directory, folder)
        generator = torch.Generator().manual_seed(seed)
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            for name, tensor in tensors.items():
                if kept == "everything" or (kept == "one expert" and EXPERT.format(seed) in name):
                    tensors[name] = tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
                elif kept == "one element" and EXPERT.format(seed) + "up_proj" in name:
                    tensor.view(-1)[seed] += 0.01
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
        return str(folder)

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/update_weights_from_disk":
            push = json.loads(body)
            body = json.dumps({**push, "model_path": await asyncio.to_thread(spoilt, push["model_path"])}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url + request.path_qs, data=body or None, headers=headers) as answer,
        ):
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{tail:.*}", forward)
    runner = web.AppRunner(app)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return port

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
