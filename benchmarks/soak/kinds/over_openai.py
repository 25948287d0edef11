"""OpenAI's own client: chats, tools, schemas, several outputs, embeddings."""

import base64
import json
import struct
from collections import defaultdict
from typing import Any

import openai

from benchmarks.soak.event_stream import PassingError
from benchmarks.soak.kinds.base import Clients, Kind
from benchmarks.soak.kinds.over_grpc import near

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12, "pattern": "^[A-Za-z]+$"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kinds": {"type": "array", "items": {"enum": ["old", "new", "other"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}


class _OpenAi(Kind):
    def first(self, clients: Clients, number: int) -> Any:
        try:
            return self._ask(clients, number)
        except (openai.APITimeoutError, openai.APIStatusError) as error:
            if isinstance(error, openai.APIStatusError) and error.status_code in (429, 503):
                raise PassingError(f"HTTP {error.status_code}") from error
            raise
        except openai.APIConnectionError as error:
            raise PassingError(f"connection: {type(error.__cause__ or error).__name__}") from error
        except openai.APIError as error:
            # An error event.
            if error.code in ("overloaded", "unavailable"):
                raise PassingError(f"error event {error.code}") from error
            raise
        except Exception as error:
            # The transport below the client has errors of its own while a stream is read.
            if type(error).__module__.startswith("http"):
                raise PassingError(f"connection: {type(error).__name__}") from error
            raise

    def _ask(self, clients: Clients, number: int) -> Any:
        raise NotImplementedError

    def _chat(self, clients: Clients, number: int, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": self.texts[number % len(self.texts)]}]
        defaults = {"temperature": 0.7 * (number % 2), "seed": number}
        return clients.openai.chat.completions.create(model=clients.model, messages=messages, **{**defaults, **options})


class Chat(_OpenAi):
    name = "streamed chat, openai"

    def _ask(self, clients: Clients, number: int) -> Any:
        text, reason = "", None
        for chunk in self._chat(clients, number, max_tokens=32, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        if reason is None:
            raise PassingError("the stream broke")
        return text, reason


class Tools(_OpenAi):
    name = "chat with tools, openai"

    def _ask(self, clients: Clients, number: int) -> Any:
        options = {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
        (choice,) = self._chat(clients, number, **options).choices
        arguments = choice.message.tool_calls[0].function.arguments
        if set(json.loads(arguments)) != {"city", "unit"}:
            raise ValueError(f"arguments do not fit the tool: {arguments!r}")
        return arguments


class Schema(_OpenAi):
    name = "JSON schema, openai"

    def _ask(self, clients: Clients, number: int) -> Any:
        wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True}}
        (choice,) = self._chat(clients, number, response_format=wanted, max_tokens=120).choices
        content = choice.message.content
        if set(json.loads(content)) != set(_SCHEMA["properties"]):
            raise ValueError(f"the answer does not fit the schema: {content!r}")
        return content


class Several(_OpenAi):
    """Outputs of one prompt with different seeds, streamed or not."""

    name = "n = 3, openai"

    def _ask(self, clients: Clients, number: int) -> Any:
        options: dict[str, Any] = {"n": 3, "seed": number, "temperature": 0.8, "max_tokens": 16}
        prompt = self.texts[number % len(self.texts)]
        if number % 2:
            answer = clients.openai.completions.create(model=clients.model, prompt=prompt, **options)
            return [choice.text for choice in answer.choices]
        texts: defaultdict[int, str] = defaultdict(str)
        ended = set()
        for chunk in clients.openai.completions.create(model=clients.model, prompt=prompt, stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    ended.add(choice.index)
        if len(ended) != 3:
            raise PassingError("the stream broke")
        return [texts[index] for index in range(3)]


class OpenAiEmbeddings(_OpenAi):
    name = "embeddings, openai"

    def _ask(self, clients: Clients, number: int) -> Any:
        texts = [self.texts[(number + i) % len(self.texts)] for i in range(2)]
        answer = clients.openai.embeddings.create(model=clients.model, input=texts, encoding_format="base64")
        data = b"".join(base64.b64decode(str(item.embedding)) for item in answer.data)
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    def is_right(self, first: Any, again: Any) -> bool:
        return len(first) == len(again) and near(first, again)
