"""Checks a client's sampling options and makes the workers' parameters."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tandem.router.errors import InvalidRequestError, RequestTooLargeError, mistakes_in
from tandem.router.text.stop_strings import check_stop_strings
from tandem.router.text.tokenizer import Tokenizer
from tandem.sampling_params import (
    MAX_NUM_ALLOWED,
    MAX_NUM_BIASED,
    MAX_NUM_LOGPROB_IDS,
    MAX_NUM_STOP_TOKENS,
    SamplingParams,
)

SEED_BITS = 64
# Of wrong token ids; a message is cut beyond 500 characters.
MAX_NUM_LISTED = 100
# Fields of SamplingParams that clients set in other forms.
MADE_FIELDS = (
    "max_tokens",
    "logit_bias",
    "seed",
    "stop_token_ids",
    "num_logprobs",
    "num_prompt_logprobs",
    "grammar",
    "allowed_token_ids",
    "logprob_token_ids",
)
PLAIN_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name not in MADE_FIELDS)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """A client's options. `plain` has the given PLAIN_FIELDS, unchanged."""

    max_tokens: int | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    grammar: str = ""
    allowed_token_ids: Sequence[int] = ()
    logprob_token_ids: Sequence[int] = ()
    plain: Mapping[str, Any] = field(default_factory=dict)


def sampling_params(
    options: SamplingOptions,
    tokenizer: Tokenizer,
    *,
    num_prompt_tokens: int,
    num_left: int,
    default_max_tokens: int | None,
) -> SamplingParams:
    """
    Args:
        num_left: tokens that the model's length leaves for the output.
        default_max_tokens: for clients that name none; None: num_left.

    Raises InvalidRequestError: an option is out of range.
    """
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = num_left if default_max_tokens is None else min(default_max_tokens, num_left)
    elif not 1 <= max_tokens <= num_left:
        bounds = f"between 1 and {num_left} for a prompt of {num_prompt_tokens} tokens"
        why = f"max_tokens must be {bounds}, not {max_tokens}"
        if max_tokens < 1:
            raise InvalidRequestError(why, "max_tokens")
        raise RequestTooLargeError(
            f"{why}: this model's maximum context length is {num_prompt_tokens + num_left} tokens", "max_tokens"
        )
    if (min_tokens := options.plain.get("min_tokens", 0)) > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens, {max_tokens}, not {min_tokens}", "min_tokens"
        )
    named: tuple[tuple[str, Collection[int], int], ...] = (
        ("logit_bias", options.logit_bias, MAX_NUM_BIASED),
        ("stop_token_ids", options.stop_token_ids, MAX_NUM_STOP_TOKENS),
        ("allowed_token_ids", options.allowed_token_ids, MAX_NUM_ALLOWED),
        ("logprob_token_ids", options.logprob_token_ids, MAX_NUM_LOGPROB_IDS),
    )
    for name, ids, limit in named:
        with mistakes_in(name):
            if len(ids) > limit:
                raise ValueError(f"{name} may name at most {limit} tokens, not {len(ids)}")
            if wrong := [token_id for token_id in ids if not 0 <= token_id < tokenizer.vocab_size]:
                are = "token id {} is" if len(wrong) == 1 else "token ids {} are"
                listed = are.format(", ".join(map(str, wrong[:MAX_NUM_LISTED])))
                raise ValueError(f"{name}: {listed} outside the vocabulary of {tokenizer.vocab_size}")
    if options.grammar and options.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos cannot be had with structured output, which ends when it is whole", "ignore_eos"
        )
    if options.grammar and options.allowed_token_ids:
        # Together they might leave no token.
        raise InvalidRequestError("allowed_token_ids cannot be had with structured output", "allowed_token_ids")
    if options.logprob_token_ids and options.num_logprobs is None:
        raise InvalidRequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
    stop_token_ids = [*options.stop_token_ids, *(() if options.ignore_eos else tokenizer.eos_token_ids)]
    with mistakes_in("stop"):
        check_stop_strings(options.stop)
    with mistakes_in(""):
        return SamplingParams(
            max_tokens=max_tokens,
            seed=random.getrandbits(SEED_BITS) if options.seed is None else options.seed,
            logit_bias=tuple(sorted(options.logit_bias.items())),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
            num_logprobs=options.num_logprobs,
            num_prompt_logprobs=options.num_prompt_logprobs,
            grammar=options.grammar,
            allowed_token_ids=tuple(options.allowed_token_ids),
            logprob_token_ids=tuple(dict.fromkeys(options.logprob_token_ids)),
            **options.plain,
        )


def check_vocabulary(tokenizer: Tokenizer, token_ids: Collection[int], what: str = "") -> None:
    """Raises ValueError. Only the extremes are checked: there may be hundreds of thousands of ids."""
    vocab_size = tokenizer.vocab_size
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{what}token id {token_id} is outside the vocabulary of {vocab_size}")
