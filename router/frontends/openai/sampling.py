"""From the fields of an OpenAI body to sampling options."""

from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.request import Body
from tandem.router.frontends.sampling import PLAIN_FIELDS, SEED_BITS, SamplingOptions

# OpenAI's default; gRPC's is 0.
DEFAULT_TEMPERATURE = 1.0


def sampling_options(
    frontend: Frontend,
    body: Body,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> SamplingOptions:
    given = {name: value for name in PLAIN_FIELDS if (value := getattr(body, name)) is not None}
    return SamplingOptions(
        max_tokens=max_tokens,
        # Any negative seed is accepted.
        seed=None if body.seed is None else body.seed % 2**SEED_BITS,
        logit_bias={int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()},
        stop=body.stop_strings,
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        allowed_token_ids=body.allowed_token_ids or (),
        logprob_token_ids=body.logprob_token_ids or (),
        plain={"temperature": DEFAULT_TEMPERATURE, **frontend.sampling_defaults.plain, **given},
    )
