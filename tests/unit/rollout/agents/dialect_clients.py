"""Clients of every dialect with one history: each sends it in its own form, and takes the answer back into it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

History = list[dict[str, Any]]
"""Messages as chat completions have them; `reasoning_content` is the thinking."""


class Refused(Exception):
    """A refusal in the dialect's form."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


class DialectClient:
    """A client of one dialect. `streams`: answers are put together from the events of a stream."""

    path: str

    def __init__(self, base_url: str, api_key: str, *, streams: bool = False) -> None:
        self._url, self._streams = base_url, streams
        self._http = aiohttp.ClientSession(headers=self.headers(api_key))

    async def close(self) -> None:
        await self._http.close()

    def headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    async def say(self, history: History, tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> dict[str, Any]:
        """The answer to `history`, as a message of it."""
        body = {"model": "policy", "stream": self._streams, **self.body(history, tools), **options}
        return self.message(await self.post(self.path, body))

    async def post(self, path: str, body: object) -> Any:
        async with self._http.post(f"{self._url}/{path}", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise Refused(response.status, json.loads(text))
            return self.joined(text) if response.content_type == "text/event-stream" else json.loads(text)

    def body(self, history: History, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        raise AssertionError

    def message(self, answer: Any) -> dict[str, Any]:
        raise AssertionError

    def joined(self, text: str) -> Any:
        """The whole answer of a stream."""
        raise AssertionError


def events_of(text: str) -> list[dict[str, Any]]:
    """Events of a stream, whose names are their types."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    made = []
    for lines in events:
        name, data = lines.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


class ChatClient(DialectClient):
    path = "chat/completions"

    def body(self, history: History, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"messages": history} | ({"tools": tools} if tools else {})

    def message(self, answer: Any) -> dict[str, Any]:
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def joined(self, text: str) -> Any:
        *events, end, rest = text.split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        message: dict[str, Any] = {"content": None}
        for event in events:
            [choice] = json.loads(event.removeprefix("data: "))["choices"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    message.setdefault(name, []).extend(value)
                elif value:
                    message[name] = (message.get(name) or "") + value
        return {"choices": [{"message": message}]}


class MessagesClient(DialectClient):
    path = "messages"

    def headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def body(self, history: History, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        system = [message["content"] for message in history if message["role"] == "system"]
        made: dict[str, Any] = {"max_tokens": 10_000, "messages": []}
        if system:
            [made["system"]] = system
        for message in history:
            match message["role"]:
                case "user":
                    made["messages"].append({"role": "user", "content": message["content"]})
                case "assistant":
                    made["messages"].append({"role": "assistant", "content": self.blocks(message)})
                case "tool":
                    block = {
                        "type": "tool_result",
                        "tool_use_id": message["tool_call_id"],
                        "content": [{"type": "text", "text": message["content"]}],
                        "cache_control": {"type": "ephemeral"},
                    }
                    made["messages"].append({"role": "user", "content": [block]})
        if tools:
            made["tools"] = [
                {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools
            ]
        return made

    def blocks(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        return blocks

    def message(self, answer: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": None}
        for block in answer["content"]:
            match block["type"]:
                case "thinking":
                    assert block["signature"] == answer["id"]
                    made["reasoning_content"] = block["thinking"]
                case "text":
                    made["content"] = block["text"]
                case "tool_use":
                    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                    calls = made.setdefault("tool_calls", [])
                    calls.append({"id": block["id"], "type": "function", "function": function})
        assert (answer["stop_reason"] == "tool_use") == ("tool_calls" in made)
        return made

    def joined(self, text: str) -> Any:
        first, *events, last = events_of(text)
        assert (first["type"], last["type"]) == ("message_start", "message_stop")
        answer = first["message"]
        content, texts = answer["content"], dict[int, str]()
        for event in events:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(content)
                    content.append(event["content_block"])
                case "content_block_delta":
                    delta, block = event["delta"], content[event["index"]]
                    match delta["type"]:
                        case "input_json_delta":
                            texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
                        case kind:
                            name = kind.removesuffix("_delta")
                            block[name] += delta[name]
                case "content_block_stop":
                    if event["index"] in texts:
                        content[event["index"]]["input"] = json.loads(texts[event["index"]])
                case "message_delta":
                    answer |= event["delta"]
                    answer["usage"] |= event["usage"]
        return answer


class ResponsesClient(DialectClient):
    """Sends all items with every request."""

    path = "responses"

    def body(self, history: History, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        system = [message["content"] for message in history if message["role"] == "system"]
        made: dict[str, Any] = {"input": self.items(history), "store": False, "include": self.include()}
        if system:
            [made["instructions"]] = system
        if tools:
            made["tools"] = [{"type": "function", **tool["function"], "strict": False} for tool in tools]
        return made

    def include(self) -> list[str]:
        return []

    def items(self, history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for message in history:
            match message["role"]:
                case "user":
                    items.append({"role": "user", "content": [{"type": "input_text", "text": message["content"]}]})
                case "assistant":
                    items += self.answer_items(message)
                case "tool":
                    output = {"call_id": message["tool_call_id"], "output": message["content"]}
                    items.append({"type": "function_call_output", **output})
        return items

    def answer_items(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            items.append({"type": "reasoning", "id": "rs", "summary": [], **self.thinking(message)})
        if message["content"] or not message.get("tool_calls"):
            part: dict[str, Any] = {"type": "output_text", "text": message["content"] or "", "annotations": []}
            items.append({"type": "message", "id": "msg", "role": "assistant", "content": [part]})
        for call in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        return items

    def thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "reasoning_text", "text": message["reasoning_content"]}]}

    def message(self, answer: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": None}
        for item in answer["output"]:
            match item["type"]:
                case "reasoning":
                    [part] = item["content"]
                    made["reasoning_content"] = part["text"]
                case "message":
                    [part] = item["content"]
                    made["content"] = part["text"]
                case "function_call":
                    function = {"name": item["name"], "arguments": item["arguments"]}
                    calls = made.setdefault("tool_calls", [])
                    calls.append({"id": item["call_id"], "type": "function", "function": function})
        return made

    def joined(self, text: str) -> Any:
        events = events_of(text)
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        whole = events[-1]["response"]
        assert events[-1]["type"] == f"response.{whole['status']}"
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert items == whole["output"]
        for kind in ("output_text", "reasoning_text", "function_call_arguments"):
            said = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
            done = [event for event in events if event["type"] == f"response.{kind}.done"]
            assert said == [event.get("text", event.get("arguments")) for event in done]
        return whole


class SealedClient(ResponsesClient):
    """Sends thinking back in its opaque form alone."""

    def include(self) -> list[str]:
        return ["reasoning.encrypted_content"]

    def thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"encrypted_content": base64.b64encode(message["reasoning_content"].encode()).decode()}

    def message(self, answer: Any) -> dict[str, Any]:
        made = super().message(answer)
        for item in answer["output"]:
            if item["type"] == "reasoning":
                assert item["encrypted_content"] == self.thinking(made)["encrypted_content"]
        return made


class StoredClient(ResponsesClient):
    """Sends what is new behind the last answer that it has got, and names that one."""

    def __init__(self, base_url: str, api_key: str, *, streams: bool = False) -> None:
        super().__init__(base_url, api_key, streams=streams)
        self._names: list[tuple[str, dict[str, Any]]] = []

    def body(self, history: History, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        made = super().body(history, tools) | {"store": True}
        for name, message in self._names[::-1]:
            places = [place for place, entry in enumerate(history) if entry is message]
            if places:
                return made | {"input": self.items(history[places[0] + 1 :]), "previous_response_id": name}
        return made

    def message(self, answer: Any) -> dict[str, Any]:
        made = super().message(answer)
        self._names.append((answer["id"], made))
        return made


CLIENTS: dict[str, type[DialectClient]] = {
    "chat": ChatClient,
    "messages": MessagesClient,
    "responses": ResponsesClient,
    "responses, sealed": SealedClient,
    "responses, stored": StoredClient,
}
