"""Bodies and answers of POST /v1/embeddings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from tandem.embedding import MAX_INPUTS
from tandem.router.frontends.openai.answer_schema import PromptTokensDetails
from tandem.router.frontends.openai.lenient import LenientRequest, Unserved, refusal_of
from tandem.router.frontends.openai.schema import TokenIds, prompt_kind
from tandem.router.text.input_encoder import AS_MANY_AS_FIT

_MANY = Field(fail_fast=True, max_length=MAX_INPUTS)

InputField = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[list[str], _MANY, Tag("#texts")]
    | Annotated[TokenIds, Tag("#list")]
    | Annotated[list[TokenIds], _MANY, Tag("#lists")],
    Discriminator(
        prompt_kind,
        custom_error_type="input_type",
        custom_error_message="Input should be a string, a list of strings, token ids, or a list of lists of token ids",
    ),
]

_PROMPTS = Unserved("inputs are embedded as they are: put the instruction into input")
_CONVERSATION = Unserved("conversations are not embedded: send their text as input")


class EmbeddingRequest(LenientRequest):
    """Texts or token ids to embed. From `truncate_prompt_tokens` on the fields are not OpenAI's."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "messages": _CONVERSATION,
        "chat_template": _CONVERSATION,
        # Other servers change the input by these.
        **dict.fromkeys(("input_type", "task", "prompt_name", "instruction", "text_type"), _PROMPTS),
        "late_chunking": Unserved("inputs are embedded one by one", (False,)),
        "embed_dtype": Unserved("embeddings are float32", ("float32",)),
        "endianness": Unserved("embeddings are little-endian", ("native", "little")),
        "padding": Unserved("inputs are never padded", ("do_not_pad",)),
        "pooling": Unserved("the last token's state is the embedding", ("last",)),
        "prompt_embeds": Unserved("embeddings as inputs are not supported by this server"),
        "lora_path": Unserved("LoRA adapters are not supported by this server", ("",)),
    }
    hints: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "safety_identifier", "request_id", "rid", "service_tier", "mm_processor_kwargs"}
    )

    model: str | None = None
    input: InputField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    truncate_prompt_tokens: int | None = Field(None, ge=AS_MANY_AS_FIT, lt=2**31)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    # vLLM's two names.
    normalize: bool | None = None
    use_activation: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_namespace: str | None = None
    # vLLM's name of cache_namespace.
    cache_salt: str | None = None
    session_id: str | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.cache_salt is not None and self.cache_namespace is not None:
            raise refusal_of("cache_salt", "it is another name of cache_namespace: send one of them")
        if self.use_activation is not None and self.normalize is not None:
            raise refusal_of("use_activation", "it is another name of normalize: send one of them")
        return self

    @property
    def is_normalized(self) -> bool:
        return self.normalize is not False and self.use_activation is not False

    @property
    def inputs(self) -> list[Any]:
        """The texts, or the lists of token ids."""
        if isinstance(self.input, list) and self.input and not isinstance(self.input[0], int):
            return list(self.input)
        return [self.input]


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]
    prompt_tokens_details: PromptTokensDetails


class EmbeddingObject(BaseModel):
    object: Literal["embedding"]
    index: int
    # Base64 of float32, little-endian.
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage
