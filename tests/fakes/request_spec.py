"""Request specs without a frontend."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.lifecycle import RECEIVED
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.resumption import ResumeState, Resumption
from tandem.sampling_params import SamplingParams


def request_spec(
    prompt_ids: Sequence[int] = (1, 2, 3),
    sampling: SamplingParams | None = None,
    *,
    output_ids: Sequence[int] = (),
    cache_namespace: str = "",
    moments: Mapping[str, int] | None = None,
    **fields: Any,
) -> RequestSpec:
    """
    Args:
        output_ids: output tokens of a resumed request.
        moments: None: received at 1.
        fields: further fields of RequestSpec.
    """
    prompt = TokenizedPrompt(
        tuple(prompt_ids), {RECEIVED: 1} if moments is None else moments, namespace=cache_namespace
    )
    if output_ids:
        fields["resumption"] = Resumption(ResumeState(0, 1, b"stream", b"", b""), output_ids, 0)
    return RequestSpec(prompt, sampling or SamplingParams(5), **fields)
