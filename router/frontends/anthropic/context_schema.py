"""`context_management` of a Messages body: edits of the conversation before it becomes the prompt."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from tandem.router.frontends.openai.lenient import LenientBody

CLEAR_TOOL_USES, CLEAR_THINKING, COMPACT = (
    "clear_tool_uses_20250919",
    "clear_thinking_20251015",
    "compact_20260112",
)
MAX_EDITS = 8
MAX_NAMES = 128
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class InputTokens(LenientBody):
    type: Literal["input_tokens"]
    value: _Count


class ToolUses(LenientBody):
    type: Literal["tool_uses"]
    value: _Count


class ThinkingTurns(LenientBody):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1, lt=2**31)


class AllTurns(LenientBody):
    type: Literal["all"]


_Names = Annotated[list[str], Field(fail_fast=True, max_length=MAX_NAMES)]


class ClearToolUses(LenientBody):
    """Replaces the results of old calls, and on request their inputs."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Discriminator("type")] | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokens | None = None
    exclude_tools: _Names | None = None
    clear_tool_inputs: bool | _Names | None = None


class ClearThinking(LenientBody):
    """Removes the reasoning of old turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[ThinkingTurns | AllTurns, Discriminator("type")] | Literal["all"] | None = None


class Compact(LenientBody):
    """Never applied here: the conversation stays whole."""

    hints = frozenset({"trigger", "instructions", "pause_after_compaction"})

    type: Literal["compact_20260112"]


class UnknownEdit(LenientBody):
    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        raise ValueError(f"edits of type {str(value.get('type'))[:64]!r} are not supported by this server")


def _edit_kind(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("type") is None:
        return None
    known = value["type"] in (CLEAR_TOOL_USES, CLEAR_THINKING, COMPACT)
    return f"#{value['type']}" if known else "#other"


Edit = Annotated[
    Annotated[ClearToolUses, Tag(f"#{CLEAR_TOOL_USES}")]
    | Annotated[ClearThinking, Tag(f"#{CLEAR_THINKING}")]
    | Annotated[Compact, Tag(f"#{COMPACT}")]
    | Annotated[UnknownEdit, Tag("#other")],
    Discriminator(
        _edit_kind,
        custom_error_type="edit_type",
        custom_error_message="Input should be an edit: an object with a type",
    ),
]


class ContextManagement(LenientBody):
    edits: Annotated[list[Edit], Field(fail_fast=True, max_length=MAX_EDITS)] | None = None

    @field_validator("edits")
    @classmethod
    def _each_once(cls, edits: list[Edit] | None) -> list[Edit] | None:
        # Every applied edit counts the prompt's tokens once more.
        kinds = [edit.type for edit in edits or ()]  # type: ignore[union-attr]
        if len(set(kinds)) < len(kinds):
            raise ValueError("each type of edit may be there once")
        return edits
