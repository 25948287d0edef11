"""The record of one request, as its frontend understood it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.router.requests.client_ids import TraceContext, current_trace_context
from tandem.router.resumption import KeptStream, Resumption
from tandem.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as token ids that fit the model's vocabulary and length.

    Attributes:
        moments: times of receipt and tokenization, in nanoseconds.
        ending: the last few characters of a chat's text.
        namespace: namespace of the workers' caches; None: no worker gets the prompt.
        identities: identities of its prefixes there by page size, where workers are chosen by them.
    """

    token_ids: Sequence[int]
    moments: Mapping[str, int]
    ending: str = ""
    namespace: str | None = None
    identities: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Everything that a client asks for in one output. A frontend builds it; nothing changes it afterwards.

    Attributes:
        sampling: checked sampling parameters, including the grammar of structured output.
        key: API key of the client; "" without keys.
        client_request_id: the client's name of the request.
        session_id: the client's name of the conversation, for the routing policy.
        stop: stop strings.
        marks: special tokens that appear in the text, by id.
        trace_context: the client's trace, if it sent one.
        resumption: tokens and text that the client already has of the output.
        kept: the record that workers keep, for a client that resumes with text alone.
        arrival_ns: time at which the client first asked; 0: the time of receipt.
        resume_token: token that workers keep with the record (router/resumption.py).
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
    arrival_ns: int = 0
    resume_token: bytes = b""

    @property
    def cache_namespace(self) -> str:
        return self.prompt.namespace or ""

    @property
    def record_id(self) -> str:
        """Name of the record that workers keep; "": none."""
        return self.kept.record_id if self.kept is not None else ""
