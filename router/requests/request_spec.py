"""Requests as frontends understood them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.adapters import AdapterRef
from tandem.embedding import EmbeddingParams
from tandem.router.adapters.names import BASE_MODEL, ServedModel
from tandem.router.requests.client_ids import TraceContext, current_trace_context
from tandem.router.resumption import KeptStream, Resumption
from tandem.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Token ids that fit the model's vocabulary and length.

    Attributes:
        moments: times of receipt and tokenization, in nanoseconds.
        ending: the last few characters of a chat's text.
        namespace: namespace of the workers' caches; None: no worker gets the prompt.
        identities: identities of the prompt's prefixes by page size, if the policy wants them.
    """

    token_ids: tuple[int, ...]
    moments: Mapping[str, int]
    ending: str = ""
    namespace: str | None = None
    identities: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A client's request for one output; never changes.

    Attributes:
        sampling: checked sampling parameters, including the grammar of structured output.
        key: API key of the client; "" without keys.
        client: digest of the client, for turns at workers; "" without a grammar.
        session_id: the client's name of the conversation.
        marks: special tokens that appear in the text, by id.
        kept: the workers' record, for a client that resumes with text alone.
        resume_token: kept by workers with the record (router/resumption.py).
        embedding: set if the prompt is only embedded; then `sampling` has no effect.
        model: the model that the request names. All attempts compute with this content of its adapter.
    """

    prompt: TokenizedPrompt
    sampling: SamplingParams
    key: str = ""
    client_request_id: str = ""
    session_id: str = ""
    priority: int = 0
    stop: Sequence[str] = ()
    marks: Mapping[int, str] | None = None
    trace_context: TraceContext | None = field(default_factory=current_trace_context.get)
    resumption: Resumption | None = None
    kept: KeptStream | None = None
    resume_token: bytes = b""
    embedding: EmbeddingParams | None = None
    client: str = ""
    model: ServedModel = BASE_MODEL

    @property
    def adapter(self) -> AdapterRef | None:
        return self.model.adapter

    @property
    def cache_namespace(self) -> str:
        return self.prompt.namespace or ""

    @property
    def record_id(self) -> str:
        return self.kept.record_id if self.kept is not None else ""
