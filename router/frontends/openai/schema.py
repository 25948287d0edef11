"""Bodies of OpenAI's completions and chat completions. unserved.py has unserved fields.

Checking stops at the first error: every report costs memory and time, and a body can hold millions.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from tandem.router.frontends.openai import unserved as others
from tandem.router.frontends.openai.lenient import LenientBody, LenientRequest, note_unknown, refusal_of
from tandem.router.frontends.openai.structured_schema import Choices, ResponseFormat, StructuredOutputs
from tandem.router.text.prompt_encoder import MAX_MESSAGES, MAX_ROLE_LEN
from tandem.sampling_params import (
    ALL_LOGPROBS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_NUM_ALLOWED,
    MAX_NUM_BIASED,
    MAX_NUM_LOGPROB_IDS,
    MAX_NUM_STOP_TOKENS,
)

MAX_CHOICES = 128
MAX_PROMPTS = 1024
INT64 = 2**63
MAX_NAME_CHARACTERS = 256

# Prefix of the names of union members in error paths.
TAG_MARK = "#"
_FAIL_FAST = Field(fail_fast=True)

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], _FAIL_FAST]
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_NUM_STOP_TOKENS)]
_MANY = Field(fail_fast=True, max_length=MAX_PROMPTS)
AllowedTokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_NUM_ALLOWED)]
LogprobTokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_NUM_LOGPROB_IDS)]
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _check_bias(value: Any) -> Any:
    """Names all wrong keys at once: a client that made one makes others."""
    if not isinstance(value, dict) or len(value) > MAX_NUM_BIASED:
        return value
    if wrong := [key for key in value if not _TOKEN_ID.fullmatch(str(key))]:
        raise ValueError(f"keys must be token ids, not {', '.join(map(repr, wrong))}")
    numbers = {key: bias for key, bias in value.items() if isinstance(bias, int | float)}
    if wrong := [key for key, bias in numbers.items() if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS]:
        listed = ", ".join(f"{numbers[key]:g} of token {key}" for key in wrong)
        raise ValueError(f"biases must be between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, not {listed}")
    return value


LogitBias = Annotated[
    dict[str, float],
    Field(fail_fast=True, max_length=MAX_NUM_BIASED),
    BeforeValidator(_check_bias),
]
_FORBIDDEN_IN_SALT = frozenset("@/\\\0")
MAX_SALT = 128


def prompt_kind(value: Any) -> str | None:
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
        prompt_kind,
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


class StreamOptions(LenientBody):
    include_usage: bool | None = None
    # vLLM's option: usage with every event.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(LenientRequest):
    """Sampling and scheduling of an output. From `top_k` on the fields are not OpenAI's."""

    min_tokens: int | None = Field(None, ge=0, lt=2**32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=2 * INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_namespace: str | None = None
    # vLLM's name of cache_namespace.
    cache_salt: str | None = None
    session_id: str | None = None

    @field_validator("cache_salt")
    @classmethod
    def _is_salt(cls, value: str | None) -> str | None:
        """vLLM's rules."""
        if value is not None and not (0 < len(value) <= MAX_SALT and _FORBIDDEN_IN_SALT.isdisjoint(value)):
            raise ValueError(f"1 to {MAX_SALT} characters are taken, without '@', '/', '\\' and NUL")
        return value

    @model_validator(mode="after")
    def _one_namespace(self) -> Self:
        if self.cache_salt is not None and self.cache_namespace is not None:
            raise refusal_of("cache_salt", "it is another name of cache_namespace: send one of them")
        return self


class _Request(SamplingFields):
    unserved = others.REQUEST
    hints = others.REQUEST_HINTS

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=ALL_LOGPROBS, le=MAX_LOGPROBS)
    logprob_token_ids: LogprobTokenIds | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopField | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(_Request):
    unserved = others.REQUEST | others.COMPLETION

    prompt: PromptField
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class TextPart(BaseModel):
    # There may be sixteen thousand parts, so no validator runs in Python.
    model_config = ConfigDict(extra="ignore", strict=True)

    # OpenAI's Responses API names parts by direction.
    type: Literal["text", "input_text", "output_text"]
    text: str


_NAMES_OF_PARTS = others.PART_HINTS | TextPart.model_fields.keys()

MessageContent = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[TextPart], _FAIL_FAST, Tag("#list")],
    Discriminator(
        _text_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class ChatMessage(LenientBody):
    """A message with text only."""

    unserved = others.MESSAGE
    hints = others.MESSAGE_HINTS

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_LEN)]
    content: MessageContent | None = None
    # Of a participant, or of the function that a result is of.
    name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @field_validator("content", mode="before")
    @classmethod
    def _note_unknown_of_parts(cls, value: Any) -> Any:
        if isinstance(value, list):
            for part in value:
                if isinstance(part, dict) and not part.keys() <= _NAMES_OF_PARTS:
                    note_unknown(part, _NAMES_OF_PARTS)
        return value

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        # An assistant's message may have calls only.
        if self.content is None and self.role != "assistant":
            raise refusal_of("content", f"a message of role {self.role} needs one")
        return self


class ChatCompletionRequest(_Request):
    unserved = others.REQUEST | others.CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: Annotated[list[Literal["text"]], _FAIL_FAST] | None = None
