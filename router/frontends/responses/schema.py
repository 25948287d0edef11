"""Bodies of OpenAI's Responses API."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from tandem.router.frontends.openai.lenient import LenientBody, refusal_of
from tandem.router.frontends.openai.schema import MessageContent, SamplingFields
from tandem.router.frontends.openai.tools_schema import (
    FUNCTION_NAME,
    MAX_ID,
    MAX_TOOLS,
    MAX_VARIABLES,
    FunctionDefinition,
)
from tandem.router.frontends.responses import unserved as others
from tandem.router.text.prompt_encoder import MAX_MESSAGES

# OpenAI's own limits.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
_FAIL_FAST = Field(fail_fast=True)
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
MAX_INCLUDED = 32
LOGPROBS = "message.output_text.logprobs"


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class MessageItem(LenientBody):
    hints = others.ITEM_HINTS

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent

    @property
    def text(self) -> str:
        return _text_of(self.content)


class CallItem(LenientBody):
    """A call made by an assistant."""

    hints = others.ITEM_HINTS

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_ID)
    name: str = Field(min_length=1, max_length=MAX_ID)
    arguments: str
    namespace: Annotated[str, Field(max_length=MAX_ID)] | None = None


class CallOutputItem(LenientBody):
    hints = others.ITEM_HINTS

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=MAX_ID)
    output: MessageContent

    @property
    def text(self) -> str:
        return _text_of(self.output)


class ReasoningText(LenientBody):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(LenientBody):
    """An assistant's reasoning before its answer. Models here write no summaries."""

    hints = others.ITEM_HINTS | {"summary", "encrypted_content"}

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], _FAIL_FAST] | None = None

    @property
    def text(self) -> str:
        return _text_of(self.content)


class RefusedItem(LenientBody):
    """Not served."""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        kind = value.get("type")
        if kind == "item_reference":
            raise ValueError("item_reference is not supported by this server: send the item itself")
        raise ValueError(f"items of type {str(kind)[:64]!r} are not supported by this server")


def _item_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "#message" if "role" in value else None
    return f"#{kind}" if kind in _KINDS else "#other"


Item = Annotated[
    Annotated[MessageItem, Tag("#message")]
    | Annotated[CallItem, Tag("#function_call")]
    | Annotated[CallOutputItem, Tag("#function_call_output")]
    | Annotated[ReasoningItem, Tag("#reasoning")]
    | Annotated[RefusedItem, Tag("#other")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message="Input should be an item: a message with a role, or an object with a type",
    ),
]


def _text_or_items(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    return "#items" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("#items")],
    Discriminator(
        _text_or_items,
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of items",
    ),
]


class FunctionTool(FunctionDefinition):
    unserved = others.TOOL

    type: Literal["function"]

    @property
    def definition(self) -> dict[str, Any]:
        return self.model_dump(exclude={"type"})


class NamespaceTool(LenientBody):
    """Functions that share a part of their names."""

    type: Literal["namespace"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class RefusedTool(LenientBody):
    """Not served."""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        raise ValueError(f"{str(value.get('type'))[:64]} is not supported by this server: tools are functions")


def _tool_kind(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("type") is None:
        return None
    return f"#{value['type']}" if value["type"] in ("function", "namespace") else "#other"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("#function")]
    | Annotated[NamespaceTool, Tag("#namespace")]
    | Annotated[RefusedTool, Tag("#other")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool_type",
        custom_error_message='Input should be a function: {"type": "function", "name": …, "parameters": …}',
    ),
]


class NamedFunction(LenientBody):
    type: Literal["function"]
    name: str


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    if not isinstance(value, dict) or value.get("type") is None:
        return None
    return "#function" if value["type"] == "function" else "#other"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#text")]
    | Annotated[NamedFunction, Tag("#function")]
    | Annotated[RefusedTool, Tag("#other")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be 'none', 'auto', 'required', or a function: "
        '{"type": "function", "name": …}',
    ),
]


class TextFormat(LenientBody):
    hints = frozenset({"description"})

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(LenientBody):
    hints = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(LenientBody):
    """The effort is for templates that know it; the rest has no effect."""

    unserved = others.REASONING
    hints = frozenset({"generate_summary", "mode"})

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Annotated[str, Field(max_length=64)] | None = None


ConversationId = Annotated[str, Field(max_length=MAX_ID)]


class ConversationName(LenientBody):
    id: ConversationId


def _text_or_object(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    return "#object" if isinstance(value, dict) else None


class ResponseRequest(SamplingFields):
    unserved = others.REQUEST
    hints = others.REQUEST_HINTS

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=MAX_INCLUDED)] | None = None
    stream: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None

    background: bool | None = None
    conversation: (
        Annotated[
            Annotated[ConversationId, Tag("#text")] | Annotated[ConversationName, Tag("#object")],
            Discriminator(
                _text_or_object,
                custom_error_type="conversation_type",
                custom_error_message="Input should be a conversation's id, or an object with it",
            ),
        ]
        | None
    ) = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token of the text; None: no log probabilities."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        if self.background and self.store is False:
            raise refusal_of("background", "a response in the background is stored: leave out store")
        if self.background and self.stream:
            raise refusal_of("background", "a response in the background is polled, not streamed: leave out stream")
        if self.conversation is not None and self.previous_response_id is not None:
            raise refusal_of("conversation", "a response continues a conversation or a response: send one of them")
        return self
