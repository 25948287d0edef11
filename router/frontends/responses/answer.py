"""Makes a response's object and events from an output's parts."""

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tandem.router.errors import RequestError, shortened
from tandem.router.frontends.openai.errors import error_object
from tandem.router.frontends.openai.one_output import AnswerForm, NamedEvent, OneOutput
from tandem.router.frontends.responses.namespaces import called_names
from tandem.router.frontends.responses.schema import NamespaceTool, ResponseRequest, ResponseTool
from tandem.router.text.output_parts import Part

ID_BYTES = 12


def item_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(ID_BYTES)}"


class ResponseAnswer(AnswerForm):
    """One response. An item of its output is open until the next begins."""

    def __init__(
        self,
        body: ResponseRequest,
        output: OneOutput,
        response_id: str,
        model: str,
        keep: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Args: keep: awaited with the whole response before its last event."""
        self._body = body
        self._source = output
        self._keep = keep
        self._num_events = 0
        self._called_names = called_names(body.tools)
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._kind = ""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        text_format = body.text.format if body.text else None
        wanted = text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}
        reasoning = body.reasoning
        self._response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if body.background else "in_progress",
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "store": body.store is not False,
            "temperature": output.sampling.temperature,
            "text": {"format": wanted},
            "tool_choice": _choice(body),
            "tools": [_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": output.sampling.top_p,
            "truncation": body.truncation or "disabled",
            "conversation": {"id": body.conversation_id} if body.conversation_id else None,
            "usage": None,
            "user": None,
            "metadata": body.metadata or {},
        }

    def begin(self) -> list[NamedEvent]:
        created = self._of_response("response.created")
        self._response["status"] = "in_progress"
        return [created, self._of_response("response.in_progress")]

    def add(self, part: Part) -> list[NamedEvent]:
        events: list[NamedEvent] = []
        if self._open is None or part.kind == "call" or _item_kind(part) != self._kind:
            events = self._close("completed") + self._begin_item(part)
        logprobs = self._source.take_logprobs(part)
        if part.kind == "call":
            return events
        self._texts.append(part.text)
        name = {"content": "output_text", "reasoning": "reasoning_text"}.get(part.kind, "function_call_arguments")
        shown = {}
        if part.kind == "content":
            self._logprobs += logprobs
            shown["logprobs"] = logprobs
        return [*events, self._of_part(f"response.{name}.delta", delta=part.text, **shown)]

    def end(self) -> list[NamedEvent]:
        is_whole = self._source.finish_reason != "length"
        events: list[NamedEvent] = []
        if self._open is None and not self._items:
            # An empty answer is a message too.
            events = self._begin_item(Part("content", "", 0))
        status = "completed" if is_whole else "incomplete"
        events += self._close(status)
        self._response |= {"status": status, "output": self._items, "usage": self._usage()}
        if not is_whole:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._of_response(f"response.{status}")]

    def fail(self, error: RequestError) -> list[NamedEvent]:
        found = error_object(error)["error"]
        failure = {"code": found["code"] or "server_error", "message": shortened(found["message"])}
        if self._open is not None:
            self._close("incomplete")
        self._response |= {"status": "failed", "error": failure, "output": self._items}
        return [self._of_response("response.failed")]

    def cancel(self) -> None:
        if self._open is not None:
            self._close("incomplete")
        self._response |= {"status": "cancelled", "output": self._items, "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        return self._response

    async def finish(self) -> None:
        await self._keep(self._response)

    def _begin_item(self, part: Part) -> list[NamedEvent]:
        self._kind, self._texts, self._logprobs = _item_kind(part), [], []
        item: dict[str, Any]
        if self._kind == "call":
            item = {
                "id": item_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": f"call_{self._source.digest_of(part.call)}",
                **self._called_names.get(part.text, {"name": part.text}),
                "arguments": "",
            }
        elif self._kind == "reasoning":
            item = {"id": item_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            item = {
                "id": item_id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        self._open = item
        added = self._event("response.output_item.added", output_index=len(self._items), item=dict(item))
        if self._kind == "call":
            return [added]
        return [added, self._of_part("response.content_part.added", part=self._part(""))]

    def _close(self, status: str) -> list[NamedEvent]:
        item = self._open
        if item is None:
            return []
        text = "".join(self._texts)
        if self._kind == "call":
            item["arguments"] = text
            events = [
                self._of_part("response.function_call_arguments.done", arguments=text, name=item["name"]),
            ]
        else:
            part = self._part(text)
            item["content"] = [part]
            name = "output_text" if self._kind == "content" else "reasoning_text"
            shown = {"logprobs": self._logprobs} if self._kind == "content" else {}
            events = [
                self._of_part(f"response.{name}.done", text=text, **shown),
                self._of_part("response.content_part.done", part=part),
            ]
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        self._open = None
        return events

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _of_part(self, event: str, **content: Any) -> NamedEvent:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        if self._kind != "call":
            place["content_index"] = 0
        return self._event(event, **place, **content)

    def _of_response(self, name: str) -> NamedEvent:
        return self._event(name, response=dict(self._response))

    def _event(self, event: str, **content: Any) -> NamedEvent:
        number, self._num_events = self._num_events, self._num_events + 1
        return event, {"type": event, "sequence_number": number, **content}

    def _usage(self) -> dict[str, Any]:
        source = self._source
        return {
            "input_tokens": source.num_prompt_tokens,
            "input_tokens_details": source.cached_details,
            "output_tokens": source.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": source.num_reasoning_tokens},
            "total_tokens": source.num_prompt_tokens + source.num_output_tokens,
        }


def _item_kind(part: Part) -> str:
    return "call" if part.kind == "arguments" else part.kind


def _tool(tool: ResponseTool) -> dict[str, Any]:
    found = {"strict": None, "description": None, **tool.model_dump()}
    if isinstance(tool, NamespaceTool):
        del found["strict"]
    return found


def _choice(body: ResponseRequest) -> Any:
    if body.tool_choice is None or isinstance(body.tool_choice, str):
        return body.tool_choice or "auto"
    return body.tool_choice.model_dump()
