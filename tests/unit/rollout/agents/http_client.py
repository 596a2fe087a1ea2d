"""A plain client of OpenAI's interface: what its package does, where the package is not installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp


class Refusal(Exception):
    """An answer with an error in OpenAI's form."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {error['message']}")
        self.status, self.code, self.kind = status, error["code"], error["type"]


class Client:
    """Sends requests as they are, and reads answers as objects.

    Args:
        base_url, api_key: as the package has them.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = base_url
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"})
        self.headers: Mapping[str, str] = {}
        """Of the last answer."""

    async def close(self) -> None:
        await self._session.close()

    async def chat(self, *messages: Any, timeout: float = 60.0, **options: Any) -> Any:
        """An answer to `messages`; with `stream` the list of its events."""
        return await self._post("chat/completions", {"messages": list(messages), **options}, timeout)

    async def complete(self, prompt: object, **options: Any) -> Any:
        return await self._post("completions", {"prompt": prompt, **options}, 60.0)

    async def models(self) -> list[str]:
        async with self._session.get(f"{self._url}/models") as response:
            return [model["id"] for model in (await response.json())["data"]]

    async def _post(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self._session.post(
            f"{self._url}/{path}", json={"model": "policy", **body}, timeout=limit
        ) as response:
            text = await response.text()
            self.headers = response.headers
            if response.status != 200:
                raise Refusal(response.status, json.loads(text)["error"])
        if not body.get("stream"):
            return json.loads(text, object_hook=_thing)
        assert response.content_type == "text/event-stream"
        *events, end, _ = text.split("\n\n")
        assert end == "data: [DONE]"
        return [json.loads(event.removeprefix("data: "), object_hook=_thing) for event in events]


class _Thing(SimpleNamespace):
    """An object; a field that it does not have is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _thing(fields: dict[str, Any]) -> _Thing:
    return _Thing(**fields)


def as_sent(message: Any) -> dict[str, Any]:
    """A message of an answer as a client sends it back."""
    made: dict[str, Any] = json.loads(json.dumps(message, default=vars))
    return made
