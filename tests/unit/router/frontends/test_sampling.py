"""Clients' sampling options."""

from typing import Any

import pytest

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.sampling import SamplingOptions, sampling_params
from tandem.sampling_params import SamplingParams
from tests.fakes.tokenizer import ByteTokenizer

NUM_PROMPT_TOKENS, NUM_LEFT = 100, 300


class Tokenizer(ByteTokenizer):
    vocab_size = 1000


def made(default_max_tokens: int | None = None, **options: Any) -> SamplingParams:
    return sampling_params(
        SamplingOptions(**options),
        Tokenizer(),  # type: ignore[arg-type]
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        num_left=NUM_LEFT,
        default_max_tokens=default_max_tokens,
    )


@pytest.mark.parametrize(
    ("default", "asked", "expected"), [(None, None, NUM_LEFT), (5, None, 5), (1000, None, NUM_LEFT), (5, 7, 7)]
)
def test_an_output_has_as_many_tokens_as_asked_for_or_as_are_left(
    default: int | None, asked: int | None, expected: int
) -> None:
    assert made(default, max_tokens=asked).max_tokens == expected


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "between 1 and 300 for a prompt of 100 tokens, not 0"),
        ({"max_tokens": 301}, "max_tokens", "not 301"),
        ({"max_tokens": 2, "plain": {"min_tokens": 3}}, "min_tokens", "at most max_tokens, 2, not 3"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias", "logit_bias: token id 1000 is outside the vocabulary of 1000"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids: token id -1 is outside"),
        ({"grammar": "start: A", "ignore_eos": True}, "ignore_eos", "cannot be had with structured output"),
        ({"stop": ["x"] * 1000}, "stop", "stop"),
        ({"plain": {"temperature": -1.0}}, "", "temperature"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_field(options: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        made(**options)
    assert refused.value.param == param


@pytest.mark.parametrize(("field", "limit"), [("logit_bias", 300), ("stop_token_ids", 300)])
def test_so_many_tokens_may_be_named_and_no_more(field: str, limit: int) -> None:
    def name(num_ids: int) -> None:
        named = dict.fromkeys(range(num_ids), 1.0)
        options: dict[str, Any] = {field: named if field == "logit_bias" else [*named]}
        made(**options)

    name(limit)
    with pytest.raises(InvalidRequestError, match=f"^{field} may name at most {limit} tokens, not {limit + 1}$") as no:
        name(limit + 1)
    assert no.value.param == field


def test_what_ends_an_output_is_the_tokenizer_s_to_say() -> None:
    assert made().stop_token_ids == (0,)
    assert made(stop_token_ids=[5, 0]).stop_token_ids == (5, 0)
    assert made(stop_token_ids=[5], ignore_eos=True).stop_token_ids == (5,)


def test_without_a_seed_each_request_has_one_of_its_own() -> None:
    assert made(seed=7).seed == 7
    assert made().seed != made().seed
