"""OpenAI's own client: chats, tools, schemas, several outputs, embeddings."""

import base64
import json
import struct
from collections import defaultdict
from typing import Any

import openai

from benchmarks.soak.case import Case
from benchmarks.soak.event_stream import PassingError
from benchmarks.soak.kinds.base import Clients, Kind
from benchmarks.soak.kinds.over_grpc import near
from tandem.router.text.structured_output import tool_calls

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
_NUM_OUTPUTS = 3
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
        return clients.openai.chat.completions.create(
            model=clients.model, messages=messages, **self.sampling(number), **options
        )

    def sampling(self, number: int) -> dict[str, Any]:
        raise NotImplementedError


class Chat(_OpenAi):
    name = "streamed chat, openai"
    max_tokens = 32

    def sampling(self, number: int) -> dict[str, Any]:
        return {"temperature": 0.7 * (number % 2), "seed": number, "max_tokens": self.max_tokens}

    def _ask(self, clients: Clients, number: int) -> Any:
        text, reason = "", None
        for chunk in self._chat(clients, number, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        if reason is None:
            raise PassingError("the stream broke")
        return text, reason

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        text, reason = answer
        return [self._case(number, text, finish_reason=reason)]

    def _case(self, number: int, output: str, **known: Any) -> Case:
        return Case(self.texts[number % len(self.texts)], self.sampling(number), output, is_chat=True, **known)


class Tools(Chat):
    name = "chat with tools, openai"
    max_tokens = 120

    def _ask(self, clients: Clients, number: int) -> Any:
        options = {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        # The router writes the tools into the prompt.
        answer = self._chat(clients, number, **options, extra_body={"return_token_ids": True})
        (choice,) = answer.choices
        arguments = choice.message.tool_calls[0].function.arguments
        if set(json.loads(arguments)) != {"city", "unit"}:
            raise ValueError(f"arguments do not fit the tool: {arguments!r}")
        return arguments, answer.prompt_token_ids, choice.token_ids

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        function: Any = _TOOL["function"]
        structure = tool_calls(
            "hermes", [(function["name"], json.dumps(function["parameters"]))], may_be_several=False, param=""
        )
        _, prompt, output = answer
        return [Case(prompt, self.sampling(number), output, (structure.kind, structure.content))]


class Schema(Chat):
    name = "JSON schema, openai"
    max_tokens = 120

    def _ask(self, clients: Clients, number: int) -> Any:
        wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True}}
        (choice,) = self._chat(clients, number, response_format=wanted).choices
        content = choice.message.content
        if set(json.loads(content)) != set(_SCHEMA["properties"]):
            raise ValueError(f"the answer does not fit the schema: {content!r}")
        return content

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        return [self._case(number, answer, structure=("json_schema", json.dumps(_SCHEMA)))]


class Several(_OpenAi):
    """Outputs of one prompt with different seeds, streamed or not."""

    name = "n = 3, openai"

    def sampling(self, number: int) -> dict[str, Any]:
        return {"seed": number, "temperature": 0.8, "max_tokens": 16}

    def _ask(self, clients: Clients, number: int) -> Any:
        options: dict[str, Any] = {"n": _NUM_OUTPUTS, **self.sampling(number)}
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
        if len(ended) != _NUM_OUTPUTS:
            raise PassingError("the stream broke")
        return [texts[index] for index in range(_NUM_OUTPUTS)]

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        # Each output has a seed of its own.
        return [
            Case(self.texts[number % len(self.texts)], {**self.sampling(number), "seed": number + index}, text)
            for index, text in enumerate(answer)
        ]


class OpenAiEmbeddings(_OpenAi):
    name = "embeddings, openai"

    def _ask(self, clients: Clients, number: int) -> Any:
        texts = [self.texts[(number + i) % len(self.texts)] for i in range(2)]
        answer = clients.openai.embeddings.create(model=clients.model, input=texts, encoding_format="base64")
        data = b"".join(base64.b64decode(str(item.embedding)) for item in answer.data)
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    def is_right(self, first: Any, again: Any) -> bool:
        return len(first) == len(again) and near(first, again)
