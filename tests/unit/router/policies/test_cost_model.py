"""Costs as the document has them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.messages import ForwardTimes
from tandem.router.policies import cost_model
from tandem.router.policies.cost_model import LATE, MIN_OUTPUT_TOKENS, TAIL_SHARE, Load, Speed
from tandem.router.workers.objectives import Objectives

loads = st.builds(
    Load,
    st.integers(0, 100_000),
    st.integers(0, 256),
    st.integers(0, 1_000_000),
    st.integers(1_000, 1_000_000),
    st.integers(0, 1_000_000),
)
prompt_times = (st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-8))
step_times = (st.floats(1e-3, 0.05), st.floats(0, 1e-3), st.floats(0, 1e-7))
speeds = st.builds(
    Speed, st.builds(ForwardTimes, *prompt_times, *step_times, st.floats(0, 0.5)), output_tokens=st.floats(0, 2000)
)
# Of a prompt: tokens that are not cached, and all.
prompts = st.tuples(st.integers(0, 50_000), st.integers(0, 50_000)).map(lambda sizes: (min(sizes), max(sizes)))
objectives = st.builds(Objectives, st.floats(0.05, 5), st.floats(0.005, 0.1))


def late(share: float) -> float:
    return share + max(0.0, share - 1.0) * (LATE - 1.0)


def missed(speed: Speed, aims: Objectives) -> float:
    gap_s = speed.times.gap_beside_prompts_s
    return max(0.0, 1.0 - aims.itl_s / gap_s) / TAIL_SHARE if gap_s else 0.0


@given(loads, speeds, objectives, prompts)
def test_a_prompt_costs_what_the_document_says(
    load: Load, speed: Speed, aims: Objectives, prompt: tuple[int, int]
) -> None:
    times, n, q, big_t, i = speed.times, load.num_decoding, load.num_pending_tokens, aims.ttft_s, aims.itl_s
    x, length = prompt
    f0, f1, f2 = times.prefill_s, times.prompt_token_s, times.attended_token_s
    computing = f1 * x + f2 * x * (length - x / 2)
    o, miss = max(MIN_OUTPUT_TOKENS, speed.output_tokens), missed(speed, aims)
    expected = late((f1 * q + f0 + computing) / big_t) + computing / big_t + computing * n / (o * i) * (1 + miss)
    assert cost_model.prompt_cost(load, speed, aims).at(x, length) == pytest.approx(expected)
    assert cost_model.ttft_s(load, speed, x, length) == pytest.approx(f1 * q + f0 + computing)


@given(loads, speeds, objectives, st.integers(1, 50_000))
def test_decoding_costs_what_the_document_says(load: Load, speed: Speed, aims: Objectives, length: int) -> None:
    s0, s1, s2 = speed.times.step_s, speed.times.request_s, speed.times.kv_token_s
    n, k, q, i = load.num_decoding, load.num_kv_tokens, load.num_pending_tokens, aims.itl_s
    o, miss = max(MIN_OUTPUT_TOKENS, speed.output_tokens), missed(speed, aims)
    others = LATE if s0 + s1 * (n + 1) + s2 * k > i else 1.0
    expected = (
        late((s0 + s1 * (n + 1) + s2 * (k + length)) / i)
        + speed.times.prompt_token_s * q / (o * i) * (1 + miss)
        + others * n * (s1 + s2 * length) / i
    )
    assert cost_model.decode_line(load, speed, aims).at(length) == pytest.approx(expected)


@given(loads, speeds, objectives, prompts)
def test_reasons_are_parts_that_add_up_to_the_cost(
    load: Load, speed: Speed, aims: Objectives, size: tuple[int, int]
) -> None:
    prompt = cost_model.prompt_terms(load, speed, aims, *size)
    assert sum(prompt.values()) == pytest.approx(cost_model.prompt_cost(load, speed, aims).at(*size))
    decode = cost_model.decode_terms(load, speed, aims, size[1], size[0])
    memory = cost_model.memory_cost(load, speed, aims, size[0])
    assert sum(decode.values()) == pytest.approx(cost_model.decode_line(load, speed, aims).at(size[1]) + memory)
    assert {*prompt, *decode, "handover", "only"} == set(cost_model.REASONS)


def test_memory_costs_where_a_request_has_no_room() -> None:
    speed, aims = Speed(ForwardTimes(prompt_token_s=1e-4, step_s=0.01), output_tokens=100.0), Objectives()
    full = Load(num_decoding=10, num_pool_tokens=10_000, num_held_tokens=10_000)
    assert cost_model.num_free_tokens(full) == 0
    assert cost_model.memory_cost(full, speed, aims, 0) == 0.0
    # A tenth of what is held comes free in a tenth of an output's second.
    assert cost_model.memory_cost(full, speed, aims, 1_000) == pytest.approx(0.1 / aims.ttft_s)
    empty = Load(num_pool_tokens=10_000)
    assert cost_model.memory_cost(empty, speed, aims, 9_000) == 0.0


def test_a_request_for_which_steps_have_no_place_waits_until_one_ends() -> None:
    # 2 of 10 must end first, which each does within 100 steps of 10 ms: 0.2 s of the half second.
    speed = Speed(ForwardTimes(step_s=10e-3), output_tokens=100.0)
    full = Load(num_decoding=11, max_decoding=10)
    assert cost_model.place_cost(full, speed, Objectives(0.5, 1.0)) == pytest.approx(0.4)
    assert cost_model.place_cost(Load(num_decoding=9, max_decoding=10), speed, Objectives(0.5, 1.0)) == 0.0
