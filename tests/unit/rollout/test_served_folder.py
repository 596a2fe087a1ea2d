"""A server beside a quantised checkpoint: started without its weights, and checked once it has those of the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from moe_trm.errors import EngineError
from moe_trm.rollout.servers.backend import Requirements, Served
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import start_server
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.checks import ServerCheck
from tests.unit.rollout.local_app import LocalApp
from tests.unit.rollout.test_route_defects import SOUND, attach
from tests.unit.rollout.test_server_process import config
from tests.unit.rollout.test_sglang_engine import HF

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("described", [None, FP8, {"quant_method": "mxfp4"}])
def test_only_quantised_weights_are_left_to_the_first_push(
    tmp_path: Path, pids_file: Path, described: dict[str, Any] | None
) -> None:
    hf = {"model_type": "gpt_oss", **({} if described is None else {"quantization_config": described})}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"8 bits each")
    server = start_server(Served.of(config(tmp_path)), tmp_path / "run" / "rollout.log", "key")
    command = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
    served = Path(command[command.index("--model-path") + 1])
    files = {path.name: path.read_text() for path in served.iterdir() if path.suffix == ".json"}
    server.stop(grace_s=0.5)
    if described is None:
        assert served == tmp_path
        assert "--load-format" not in command
        return
    assert command[command.index("--load-format") + 1] == "dummy"
    assert sorted(files) == ["config.json", "tokenizer.json"]
    assert json.loads(files["config.json"]) == {"model_type": "gpt_oss"}
    assert not served.exists(), "it goes with its server"


def test_an_attached_server_with_quantised_weights_is_refused(tmp_path: Path) -> None:
    info = SOUND | {"dtype": "auto", "quantization": "fp8"}
    error = attach(info, tmp_path)
    assert "holds quantised weights" in str(error)
    assert "quantization=fp8" in str(error)


class Untempered(LocalApp):
    """Log-probs as at temperature 1, whatever is asked."""

    def routes(self) -> Sequence[web.RouteDef]:
        async def generate(_: web.Request) -> web.Response:
            top = [[-1.0 - index, index, None] for index in range(8)]
            return web.json_response(
                {"output_ids": [0], "meta_info": {"finish_reason": None, "output_top_logprobs": [top]}}
            )

        return [web.post("/generate", generate)]


def test_the_temperature_is_checked_when_random_weights_are_gone() -> None:
    async def run() -> None:
        app = Untempered()
        await app.start()
        check = ServerCheck(
            Requirements(
                ServedModel.from_config(HF),
                RequestedFields(routes=False, mask=False),
                temperature=0.5,
                dtype="float32",
                verify=True,
            )
        )
        try:
            async with EngineHttp(app.url, "k", timeout_s=5.0, max_attempts=1) as http:
                await check.loaded(http)
                check.has_random_weights(http)
                with pytest.raises(EngineError, match="temperature 1"):
                    await check.loaded(http)
                await check.loaded(http)
        finally:
            await app.stop()

    asyncio.run(run())
