"""Bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from tandem.router.frontends.anthropic import unserved as others
from tandem.router.frontends.anthropic.context_schema import ContextManagement
from tandem.router.frontends.openai.lenient import LenientBody
from tandem.router.frontends.openai.schema import SamplingFields
from tandem.router.frontends.openai.tools_schema import FUNCTION_NAME, MAX_ID, MAX_TOOLS, MAX_VARIABLES
from tandem.router.text.prompt_encoder import MAX_MESSAGES

_FAIL_FAST = Field(fail_fast=True)
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class Marked(LenientBody):
    """An object that may mark the prompt up to here for caching."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Marked):
    hints = others.BLOCK_HINTS

    type: Literal["text"]
    text: str


class RefusedBlock(LenientBody):
    """Not served."""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        kind = value.get("type")
        if isinstance(kind, str) and kind in others.BLOCKS:
            raise ValueError(others.BLOCKS[kind])
        raise ValueError(f"blocks of type {str(kind)[:64]!r} are not supported by this server here")


def _text_kind(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("type") is None:
        return None
    return "#text" if value["type"] == "text" else "#other"


def _block_kind(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("type") is None:
        return None
    return f"#{value['type']}" if value["type"] in _BLOCKS else "#other"


def _content_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "#string"
    return "#blocks" if isinstance(value, list) else None


_NO_BLOCK = "Input should be a block: an object with a type"
_NO_CONTENT = "Input should be a string or a list of blocks"
AnyText = Annotated[
    Annotated[TextBlock, Tag("#text")] | Annotated[RefusedBlock, Tag("#other")],
    Discriminator(_text_kind, custom_error_type="block_type", custom_error_message=_NO_BLOCK),
]
TextContent = Annotated[
    Annotated[str, Tag("#string")] | Annotated[list[AnyText], _FAIL_FAST, Tag("#blocks")],
    Discriminator(_content_kind, custom_error_type="content_type", custom_error_message=_NO_CONTENT),
]


def text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


class ToolUseBlock(Marked):
    hints = others.BLOCK_HINTS

    type: Literal["tool_use"]
    id: str = Field(max_length=MAX_ID)
    name: str = Field(min_length=1, max_length=MAX_ID)
    input: dict[str, Any]


class ToolResultBlock(Marked):
    hints = others.BLOCK_HINTS | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=MAX_ID)
    content: TextContent | None = None


class ThinkingBlock(LenientBody):
    hints = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(LenientBody):
    """Only its author can read it."""

    hints = frozenset({"data"})

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[ToolUseBlock, Tag("#tool_use")]
    | Annotated[ToolResultBlock, Tag("#tool_result")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[RedactedThinkingBlock, Tag("#redacted_thinking")]
    | Annotated[RefusedBlock, Tag("#other")],
    Discriminator(_block_kind, custom_error_type="block_type", custom_error_message=_NO_BLOCK),
]
Content = Annotated[
    Annotated[str, Tag("#string")]
    | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_MESSAGES), Tag("#blocks")],
    Discriminator(_content_kind, custom_error_type="content_type", custom_error_message=_NO_CONTENT),
]


class InputMessage(LenientBody):
    role: Literal["user", "assistant", "system"]
    content: Content


class MessagesTool(Marked):
    """A function that the client runs."""

    unserved = others.TOOL
    hints = others.TOOL_HINTS

    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    # Bounded as the parameters of a function.
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        # A schema's own word for examples.
        return {**self.input_schema, "examples": self.input_examples} if self.input_examples else self.input_schema


class RefusedTool(LenientBody):
    """Not served."""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        raise ValueError(f"{str(value.get('type'))[:64]} is not supported by this server: tools are the client's own")


def _tool_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return "#custom" if value.get("type") in (None, "custom") else "#other"


AnyTool = Annotated[
    Annotated[MessagesTool, Tag("#custom")] | Annotated[RefusedTool, Tag("#other")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool_type",
        custom_error_message="Input should be a tool: an object with a name and an input_schema",
    ),
]


class MessagesToolChoice(LenientBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(LenientBody):
    """Its budget has no effect."""

    hints = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class OutputSchema(LenientBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientBody):
    hints = frozenset({"task_budget"})

    format: OutputSchema | None = None
    effort: str | None = None


class CountTokensRequest(SamplingFields):
    """The parts of a prompt."""

    unserved = others.REQUEST
    hints = others.REQUEST_HINTS

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: TextContent | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Earlier name of output_config.format.
    output_format: OutputSchema | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    stop_sequences: Annotated[list[str], _FAIL_FAST] | None = None
    stream: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)


# --- Answers. ----------------------------------------------------------------------------------------------------


class OutputTokensDetails(BaseModel):
    thinking_tokens: int


class AppliedEdits(BaseModel):
    applied_edits: list[dict[str, Any]]


class OriginalTokens(BaseModel):
    original_input_tokens: int


class MessagesUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageObject(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    context_management: AppliedEdits | None = None


class TokenCount(BaseModel):
    input_tokens: int
    context_management: OriginalTokens | None = None


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorBody(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
