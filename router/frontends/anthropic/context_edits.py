"""Applies the edits of `context_management` to a conversation."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.router.frontends.anthropic.context_schema import (
    AllTurns,
    ClearThinking,
    ClearToolUses,
    ContextManagement,
    InputTokens,
)
from tandem.router.frontends.anthropic.schema import (
    CountTokensRequest,
    InputMessage,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

# Anthropic's defaults.
DEFAULT_TRIGGER = InputTokens(type="input_tokens", value=100_000)
DEFAULT_KEPT_TOOL_USES = 3
DEFAULT_KEPT_THINKING_TURNS = 1
CLEARED = "[cleared: an old result of a tool]"

Body = TypeVar("Body", bound=CountTokensRequest)
# Counts a prompt's tokens; None: more than the model's length.
Count = Callable[[CountTokensRequest], Awaitable[int | None]]


@dataclass(slots=True)
class ContextEdits:
    """Edits of one conversation.

    Attributes:
        applied: one object per edit that changed something, as in the answer's `applied_edits`.
        num_original_tokens: of the prompt before any edit; None: not counted, or more than the model's length.
    """

    applied: list[dict[str, Any]] = field(default_factory=list)
    num_original_tokens: int | None = None

    async def apply(self, body: Body, wanted: ContextManagement, count: Count) -> Body:
        """Returns the body with the edited conversation. Raises as `count`."""
        num_tokens: int | None = None
        is_counted = False
        for edit in wanted.edits or ():
            if isinstance(edit, ClearToolUses):
                messages, num_cleared = _without_tool_uses(body.messages, edit)
                at_least = edit.clear_at_least.value if edit.clear_at_least else 0
            elif isinstance(edit, ClearThinking):
                messages, num_cleared = _without_thinking(body.messages, edit)
                at_least = 0
            else:
                continue
            if not num_cleared:
                continue
            if not is_counted:
                num_tokens, is_counted = await count(body), True
                self.num_original_tokens = num_tokens
            if isinstance(edit, ClearToolUses) and not _is_triggered(edit, body.messages, num_tokens):
                continue
            edited = body.model_copy(update={"messages": messages})
            num_left = await count(edited)
            # A prompt beyond the model's length is not counted to its end.
            num_saved = 0 if num_tokens is None or num_left is None else max(0, num_tokens - num_left)
            if num_tokens is not None and num_saved < at_least:
                continue
            name = "cleared_tool_uses" if isinstance(edit, ClearToolUses) else "cleared_thinking_turns"
            self.applied.append({"type": edit.type, name: num_cleared, "cleared_input_tokens": num_saved})
            body, num_tokens = edited, num_left
        return body


def _is_triggered(edit: ClearToolUses, messages: Sequence[InputMessage], num_tokens: int | None) -> bool:
    trigger = edit.trigger or DEFAULT_TRIGGER
    if isinstance(trigger, InputTokens):
        return num_tokens is None or num_tokens > trigger.value
    return sum(isinstance(block, ToolUseBlock) for block in _blocks(messages)) > trigger.value


def _without_tool_uses(messages: Sequence[InputMessage], edit: ClearToolUses) -> tuple[list[InputMessage], int]:
    """Clears the oldest calls that have a result, except for the kept ones. Returns also their number."""
    num_kept = edit.keep.value if edit.keep else DEFAULT_KEPT_TOOL_USES
    excluded = set(edit.exclude_tools or ())
    results = {block.tool_use_id: block for block in _blocks(messages) if isinstance(block, ToolResultBlock)}
    uses = [block for block in _blocks(messages) if isinstance(block, ToolUseBlock) and block.name not in excluded]
    old = uses[: len(uses) - num_kept] if num_kept else uses
    cleared = {use.id for use in old if use.id in results and results[use.id].content != CLEARED}
    inputs = edit.clear_tool_inputs

    def loses_input(name: str) -> bool:
        return name in inputs if isinstance(inputs, list) else bool(inputs)

    def edited(block: Any) -> Any:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
            return block.model_copy(update={"content": CLEARED})
        if isinstance(block, ToolUseBlock) and block.id in cleared and loses_input(block.name):
            return block.model_copy(update={"input": {}})
        return block

    return [_with_blocks(message, edited) for message in messages], len(cleared)


def _without_thinking(messages: Sequence[InputMessage], edit: ClearThinking) -> tuple[list[InputMessage], int]:
    if edit.keep == "all" or isinstance(edit.keep, AllTurns):
        return list(messages), 0
    num_kept = DEFAULT_KEPT_THINKING_TURNS if edit.keep is None else edit.keep.value
    turns = [
        place
        for place, message in enumerate(messages)
        if any(isinstance(block, ThinkingBlock) for block in _blocks([message]))
    ]
    old = set(turns[:-num_kept])

    def edited(message: InputMessage) -> InputMessage:
        left = [block for block in message.content if not isinstance(block, ThinkingBlock)]
        return message.model_copy(update={"content": left})

    return [edited(message) if place in old else message for place, message in enumerate(messages)], len(old)


def _blocks(messages: Sequence[InputMessage]) -> list[Any]:
    return [block for message in messages if isinstance(message.content, list) for block in message.content]


def _with_blocks(message: InputMessage, edited: Callable[[Any], Any]) -> InputMessage:
    if isinstance(message.content, str):
        return message
    return message.model_copy(update={"content": [edited(block) for block in message.content]})
