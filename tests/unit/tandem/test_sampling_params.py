"""Valid and invalid sampling parameters."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tandem.sampling_params import ALL_LOGPROBS, SamplingParams

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", (1, 10**6), (0, -1)),
        ("temperature", (0.0, 1e-9, 2.0, 50.0), (-0.1, INF, NAN)),
        ("top_k", (-1, 0, 1, 10**6), (-2,)),
        ("top_p", (0.0, 0.5, 1.0), (-0.1, 1.1, INF, NAN)),
        ("min_p", (0.0, 0.5, 1.0), (-0.1, 1.1, INF, NAN)),
        ("repetition_penalty", (0.01, 1.0, 100.0), (0.0, -1.0, 101.0, INF, NAN)),
        ("presence_penalty", (-2.0, 2.0), (-2.1, 2.1, INF, NAN)),
        ("frequency_penalty", (-2.0, 2.0), (-2.1, 2.1, -INF, NAN)),
        (
            "logit_bias",
            ((), ((0, -100.0), (7, 100.0))),
            (((0, 100.5),), ((0, NAN),), ((-1, 1.0),), ((7, 1.0), (0, 1.0)), ((7, 1.0), (7, 1.0))),
        ),
        ("seed", (0, 2**64 - 1), (-1, 2**64)),
        ("stop_token_ids", ((), (3, 3)), ((-1,),)),
        ("num_logprobs", (None, 0, 20), (-1, 21)),
        ("allowed_token_ids", ((), (3, 2, 3)), ((-1,), (2**32,))),
    ],
)
def test_ranges(name: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    for value in good:
        params = SamplingParams(**{"max_tokens": 5, name: value})
        assert getattr(params, name) == value
        hash(params)
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name}"):
            SamplingParams(**{"max_tokens": 5, name: value})


def test_named_tokens_need_their_place() -> None:
    assert SamplingParams(5, num_logprobs=0, logprob_token_ids=(2,)).logprob_token_ids == (2,)
    with pytest.raises(ValueError, match="logprob_token_ids needs logprobs"):
        SamplingParams(5, logprob_token_ids=(2,))
    with pytest.raises(ValueError, match="allowed_token_ids cannot be had with structured output"):
        SamplingParams(5, allowed_token_ids=(2,), grammar="start: A", stop_token_ids=(0,))
    assert SamplingParams(5, num_prompt_logprobs=ALL_LOGPROBS).num_prompt_logprobs == -1
    assert not SamplingParams(5, allowed_token_ids=(2,)).needs_argmax_only


@pytest.mark.parametrize(
    ("top_k", "top_p", "has_filters"), [(0, 1.0, False), (-1, 1.0, False), (1, 1.0, True), (-1, 0.99, True)]
)
def test_a_filter_may_drop_tokens(top_k: int, top_p: float, has_filters: bool) -> None:
    assert SamplingParams(1, top_k=top_k, top_p=top_p).has_filters == has_filters


def test_only_the_seed_changes() -> None:
    params = SamplingParams(5, temperature=0.5, logit_bias=((7, 1.0),), seed=3, stop_token_ids=(0, 2))
    again = params.with_seed(2**64 - 1)
    assert again == replace(params, seed=2**64 - 1)
    assert params.seed == 3


def test_a_stop_token_comes_before_the_length() -> None:
    params = SamplingParams(5, stop_token_ids=(7,))
    for stop_token_ids in (None, frozenset((7,))):
        assert params.finish_reason(7, 5, stop_token_ids) == "stop"
        assert params.finish_reason(6, 5, stop_token_ids) == "length"
        assert params.finish_reason(6, 4, stop_token_ids) == ""


def test_messages_state_the_valid_range() -> None:
    with pytest.raises(ValueError, match=r"^top_p must be between 0 and 1, not 1\.5$"):
        SamplingParams(1, top_p=1.5)
    with pytest.raises(ValueError, match=r"^temperature must be a number of at least 0, not nan$"):
        SamplingParams(1, temperature=NAN)
    with pytest.raises(ValueError, match=r"^logit_bias of token 7 must be between -100 and 100, not 101$"):
        SamplingParams(1, logit_bias=((7, 101.0),))
