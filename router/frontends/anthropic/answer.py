"""Makes Anthropic's message and events from an output's parts."""

import json
from typing import Any

from tandem.router.errors import RequestError
from tandem.router.frontends.anthropic.errors import error_body
from tandem.router.frontends.openai.errors import http_error
from tandem.router.frontends.openai.one_output import AnswerForm, NamedEvent, NamedEventStream, OneOutput
from tandem.router.text.output_parts import Part


class MessageStream(NamedEventStream):
    comment = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageAnswer(AnswerForm):
    """One message. A block of its content is open until the next begins."""

    def __init__(
        self,
        output: OneOutput,
        request_id: str,
        model: str,
        *,
        shows_cached: bool,
        applied_edits: list[dict[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            shows_cached: whether cached tokens are counted separately.
            applied_edits: edits of the conversation; None: the client asked for none.
        """
        self._edits = {} if applied_edits is None else {"context_management": {"applied_edits": applied_edits}}
        self._source = output
        self._request_id = request_id
        self._shows_cached = shows_cached
        self._blocks: list[dict[str, Any]] = []
        # "": no block is open.
        self._kind = ""
        self._texts: list[str] = []
        self._message: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> list[NamedEvent]:
        return [_event("message_start", message={**self._message, "usage": self._usage()})]

    def add(self, part: Part) -> list[NamedEvent]:
        kind = "call" if part.kind == "arguments" else part.kind
        events: list[NamedEvent] = []
        if part.kind == "call" or kind != self._kind:
            events = self._close() + self._begin_block(kind, part)
        if part.kind == "call":
            return events
        self._texts.append(part.text)
        delta = {
            "content": {"type": "text_delta", "text": part.text},
            "reasoning": {"type": "thinking_delta", "thinking": part.text},
            "call": {"type": "input_json_delta", "partial_json": part.text},
        }[kind]
        return [*events, _event("content_block_delta", index=len(self._blocks), delta=delta)]

    def end(self) -> list[NamedEvent]:
        events = self._close()
        source = self._source
        if source.finish_reason == "length":
            reason = "max_tokens"
        elif source.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if source.has_calls else "end_turn"
        stop = {"stop_reason": reason, "stop_sequence": source.stop_string}
        usage = self._usage()
        self._message |= {"content": self._blocks, **stop, "usage": usage, **self._edits}
        return [*events, _event("message_delta", delta=stop, usage=usage, **self._edits), _event("message_stop")]

    def fail(self, error: RequestError) -> list[NamedEvent]:
        http = http_error(error)
        return [("error", error_body(http.status, str(error), getattr(error, "param", ""), self._request_id))]

    def whole(self) -> dict[str, Any]:
        return self._message

    async def finish(self) -> None:
        """Messages are not kept."""

    def _begin_block(self, kind: str, part: Part) -> list[NamedEvent]:
        self._kind, self._texts = kind, []
        block: dict[str, Any]
        if kind == "call":
            call_id = f"toolu_{self._source.digest_of(part.call)}"
            block = {"type": "tool_use", "id": call_id, "name": part.text, "input": {}}
        elif kind == "reasoning":
            # Signatures are not checked here.
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._block = block
        return [_event("content_block_start", index=len(self._blocks), content_block=dict(block))]

    def _close(self) -> list[NamedEvent]:
        if not self._kind:
            return []
        text = "".join(self._texts)
        if self._kind == "call":
            self._block["input"] = _arguments(text)
        else:
            self._block["thinking" if self._kind == "reasoning" else "text"] = text
        self._blocks.append(self._block)
        self._kind = ""
        return [_event("content_block_stop", index=len(self._blocks) - 1)]

    def _usage(self) -> dict[str, Any]:
        source = self._source
        num_cached = num_written = 0
        # Clients that asked for no caching expect the whole prompt in input_tokens.
        if self._shows_cached:
            num_cached, num_written = source.num_cached_tokens, source.num_newly_cached_tokens
        return {
            "input_tokens": source.num_prompt_tokens - num_cached - num_written,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": num_cached,
            "output_tokens": source.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": source.num_reasoning_tokens},
        }


def _event(name: str, **content: Any) -> NamedEvent:
    return name, {"type": name, **content}


def _arguments(text: str) -> dict[str, Any]:
    """Returns {} if the arguments are cut off or not JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
