"""Costs as the document has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.objectives import Objectives
from router.policies import cost_model
from router.policies.cost_model import LATE, MIN_OUTPUT_TOKENS, TAIL_SHARE, Load, Speed

loads = st.builds(
    Load,
    st.integers(0, 100_000),
    st.integers(0, 256),
    st.integers(0, 1_000_000),
    st.integers(1_000, 1_000_000),
)
speeds = st.builds(
    Speed,
    st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-3)),
    st.tuples(st.floats(1e-3, 0.05), st.floats(0, 1e-3), st.floats(0, 1e-7)),
    st.floats(0, 0.5),
    st.floats(0, 2000),
)
objectives = st.builds(Objectives, st.floats(0.05, 5), st.floats(0.005, 0.1))


def late(share: float) -> float:
    return share + max(0.0, share - 1.0) * (LATE - 1.0)


@given(loads, speeds, objectives, st.integers(0, 50_000))
def test_a_prompt_costs_what_the_document_says(load: Load, speed: Speed, aims: Objectives, x: int) -> None:
    (f0, f1), n, q, big_t, i = speed.prompt, load.num_decoding, load.num_pending_tokens, aims.ttft_s, aims.itl_s
    o = max(MIN_OUTPUT_TOKENS, speed.output_tokens)
    miss = max(0.0, 1.0 - i / speed.prompt_gap) / TAIL_SHARE if speed.prompt_gap else 0.0
    expected = late((f1 * q + f0 + f1 * x) / big_t) + f1 * x / big_t + f1 * x * n / (o * i) * (1 + miss)
    assert cost_model.prompt_line(load, speed, aims).at(x) == pytest.approx(expected)


@given(loads, speeds, objectives, st.integers(1, 50_000))
def test_decoding_costs_what_the_document_says(load: Load, speed: Speed, aims: Objectives, length: int) -> None:
    (s0, s1, s2), n, k, q, i = speed.step, load.num_decoding, load.num_kv_tokens, load.num_pending_tokens, aims.itl_s
    o = max(MIN_OUTPUT_TOKENS, speed.output_tokens)
    miss = max(0.0, 1.0 - i / speed.prompt_gap) / TAIL_SHARE if speed.prompt_gap else 0.0
    others = LATE if s0 + s1 * (n + 1) + s2 * k > i else 1.0
    expected = (
        late((s0 + s1 * (n + 1) + s2 * (k + length)) / i)
        + speed.prompt[1] * q / (o * i) * (1 + miss)
        + others * n * (s1 + s2 * length) / i
    )
    assert cost_model.decode_line(load, speed, aims).at(length) == pytest.approx(expected)


@given(loads, speeds, objectives, st.integers(0, 50_000))
def test_reasons_are_parts_that_add_up_to_the_cost(load: Load, speed: Speed, aims: Objectives, x: int) -> None:
    prompt = cost_model.prompt_terms(load, speed, aims, x)
    assert sum(prompt.values()) == pytest.approx(cost_model.prompt_line(load, speed, aims).at(x))
    decode = cost_model.decode_terms(load, speed, aims, x)
    memory = cost_model.memory_cost(load, speed, aims, x)
    assert sum(decode.values()) == pytest.approx(cost_model.decode_line(load, speed, aims).at(x) + memory)
    assert {*prompt, *decode, "handover", "only"} == set(cost_model.REASONS)


def test_memory_costs_where_a_request_has_no_room() -> None:
    speed, aims = Speed((0.0, 1e-4), (0.01, 0.0, 0.0), output_tokens=100.0), Objectives()
    full = Load(num_decoding=10, num_kv_tokens=9_500, num_pool_tokens=10_000)
    assert cost_model.num_free_tokens(full, speed) == 0.0
    assert cost_model.memory_cost(full, speed, aims, 0) == 0.0
    # A tenth of what is held comes free in a tenth of an output's second.
    assert cost_model.memory_cost(full, speed, aims, 1_000) == pytest.approx(0.1 / aims.ttft_s)
    empty = Load(num_pool_tokens=10_000)
    assert cost_model.memory_cost(empty, speed, aims, 9_000) == 0.0
