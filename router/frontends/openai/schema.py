"""The bodies of OpenAI's completions and chat completions, as far as they are served here.

Nothing is ignored: a field that is not named here is refused, and so is a named one that asks for what is not served.

Checking ends with the first thing that is wrong, in lists and objects too: every report costs memory and time, and a
body can hold millions.
"""

import functools
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from router.text.prompt_encoder import MAX_MESSAGES
from tandem.sampling_params import MAX_NUM_BIASED, MAX_NUM_STOP_TOKENS

MAX_CHOICES = 128
MAX_PROMPTS = 1024
INT64 = 2**63

# The names of a union's members begin with this; they stand in the paths of errors.
TAG_MARK = "#"
_FAIL_FAST = Field(fail_fast=True)

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], _FAIL_FAST]
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_NUM_STOP_TOKENS)]
_MANY = Field(fail_fast=True, max_length=MAX_PROMPTS)
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(fail_fast=True, max_length=MAX_NUM_BIASED, json_schema_extra={"additionalProperties": False}),
]


def _prompt_kind(value: Any) -> str | None:
    """Which member of a union a value is meant to be, so that it is checked as that one alone."""
    if not isinstance(value, list) or not value:
        return _text_or_list(value)
    match value[0]:
        case str():
            return "#texts"
        case list():
            return "#lists"
    return "#list"


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    return "#list" if isinstance(value, list) else None


PromptField = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[str], _MANY, Tag("#texts")]
    | Annotated[TokenIds, Tag("#list")]
    | Annotated[list[TokenIds], _MANY, Tag("#lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, token ids, or a list of lists of token ids",
    ),
]
StopField = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[str], _FAIL_FAST, Tag("#list")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]


# The limits are OpenAI's own.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class _Body(BaseModel):
    # In strict mode the string "1" is no number, and true is not 1.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _nothing_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name not in cls._names():
                    raise PydanticCustomError("unknown_field", "unknown field: {name}", {"name": name})
        return data

    @classmethod
    @functools.cache
    def _names(cls) -> frozenset[str]:
        """As they are sent."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


Choices = Annotated[list[str], _FAIL_FAST]


class JsonSchema(_Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    """As vLLM calls them; one of them is given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(_Body):
    include_usage: bool = False


class _Request(_Body):
    """What both kinds of request share. Fields from `top_k` on are this server's own."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopField | None = None
    seed: int | None = Field(None, ge=-INT64, lt=2 * INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_namespace: str | None = None
    session_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    # These two are for the caller's own books: accepted, and without effect.
    user: str | None = None
    metadata: Metadata | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(_Request):
    prompt: PromptField
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=1)
    # It is not served.
    suffix: None = None

    @field_validator("suffix", mode="before")
    @classmethod
    def _no_suffix(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("suffix is not supported by this server")
        return value


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """Of a text conversation: no tools, no images, no audio."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("#text")] | Annotated[list[TextPart], _FAIL_FAST, Tag("#list")],
        Discriminator(
            _text_or_list,
            custom_error_type="content_type",
            custom_error_message="Input should be a string or a list of text parts",
        ),
    ]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(_Request):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: Annotated[list[Literal["text"]], _FAIL_FAST] | None = None
    # To Literal[False] 0 would be the same.
    store: Annotated[bool, Field(json_schema_extra={"const": False})] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    # Tools are not served; what means "none" is taken.
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    functions: list[Any] | None = Field(None, max_length=0)
    function_call: Literal["none", "auto"] | None = None

    @field_validator("store")
    @classmethod
    def _not_stored(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("answers are not stored by this server")
        return value

    @field_validator("tools", "functions", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if isinstance(value, list) and value:
            raise ValueError("tools are not supported by this server")
        return value


# --- what is answered --------------------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tandem"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail
