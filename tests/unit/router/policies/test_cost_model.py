import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.messages import ForwardTimes
from tandem.router.policies import cost_model
from tandem.router.policies.cost_model import LATE, MIN_OUTPUT_STEPS, TAIL_SHARE, Load, Speed
from tandem.router.workers.leans import LEANS
from tandem.router.workers.objectives import Objectives

loads = st.builds(
    Load,
    st.integers(0, 100_000),
    st.integers(0, 256),
    st.integers(0, 1_000_000),
    st.integers(1_000, 1_000_000),
    st.integers(0, 1_000_000),
    st.integers(1, 512),
    st.sampled_from(LEANS),
)
prompt_times = (st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-8))
step_times = (st.floats(1e-3, 0.05), st.floats(0, 1e-3), st.floats(0, 1e-7))
speeds = st.builds(
    Speed,
    st.builds(ForwardTimes, *prompt_times, *step_times, st.floats(0, 0.5)),
    output_steps=st.floats(0, 2000),
    num_drafts=st.floats(0, 7),
)
# (tokens to compute, length of the prompt)
prompts = st.tuples(st.integers(0, 50_000), st.integers(0, 50_000)).map(lambda sizes: (min(sizes), max(sizes)))
objectives = st.builds(Objectives, st.floats(0.05, 5), st.floats(0.005, 0.1))


def late(share: float) -> float:
    return share + max(0.0, share - 1.0) * (LATE - 1.0)


def missed(speed: Speed, aims: Objectives) -> float:
    gap_s = speed.times.gap_beside_prompts_s
    return max(0.0, 1.0 - aims.itl_s / gap_s) / TAIL_SHARE if gap_s else 0.0


@given(loads, speeds, objectives, prompts)
def test_prefill_line_matches_formula(load: Load, speed: Speed, aims: Objectives, prompt: tuple[int, int]) -> None:
    times, n, q, big_t, i = speed.times, load.num_decoding, load.num_pending_tokens, aims.ttft_s, aims.itl_s
    x, length = prompt
    f0, f1, f2 = times.prefill_s, times.prompt_token_s, times.attended_token_s
    computing = f1 * x + f2 * x * (length - x / 2)
    o, miss = max(MIN_OUTPUT_STEPS, speed.output_steps), missed(speed, aims)
    lean = {"both": 1.5, "decode": 5.0}.get(load.lean, 0.0)
    expected = (
        late((f1 * q + f0 + computing) / big_t) + (1 + lean) * computing / big_t + computing * n / (o * i) * (1 + miss)
    )
    assert cost_model.prefill_line(load, speed, aims).at(computing) == pytest.approx(expected)
    assert cost_model.compute_s(speed, x, length) == pytest.approx(computing)
    assert cost_model.ttft_s(load, speed, x, length) == pytest.approx(f1 * q + f0 + computing)


@given(loads, speeds, objectives, st.integers(1, 50_000))
def test_decode_line_matches_formula(load: Load, speed: Speed, aims: Objectives, length: int) -> None:
    s0, s1, s2 = speed.times.step_s, speed.times.request_s * (1 + speed.num_drafts), speed.times.kv_token_s
    n, k, q, i = load.num_decoding, load.num_kv_tokens, load.num_pending_tokens, aims.itl_s
    o, miss = max(MIN_OUTPUT_STEPS, speed.output_steps), missed(speed, aims)
    step = s0 + s1 * (n + 1) + s2 * k
    others = LATE if step > i else 1.0
    lacking = max(0, n + 1 - load.max_decoding) / load.max_decoding
    expected = (
        late((s0 + s1 * (n + 1) + s2 * (k + length)) / i)
        + speed.times.prompt_token_s * q / (o * i) * (1 + miss)
        + others * n * (s1 + s2 * length) / i
        + late(lacking * speed.output_steps * step / aims.ttft_s)
        + {"both": 0.7, "prefill": 3.0}.get(load.lean, 0.0)
    )
    assert cost_model.decode_line(load, speed, aims).at(length) == pytest.approx(expected)


@given(loads, speeds, objectives, prompts)
def test_parts_add_up_to_cost(load: Load, speed: Speed, aims: Objectives, size: tuple[int, int]) -> None:
    prompt = cost_model.prompt_parts(load, speed, aims, *size)
    seconds = cost_model.compute_s(speed, *size)
    assert sum(prompt.values()) == pytest.approx(cost_model.prefill_line(load, speed, aims).at(seconds))
    decode = cost_model.decode_parts(load, speed, aims, size[1], size[0])
    memory = cost_model.memory_cost(load, speed, aims, size[0])
    assert sum(decode.values()) == pytest.approx(cost_model.decode_line(load, speed, aims).at(size[1]) + memory)
    assert {*prompt, *decode, "handover", "only"} == set(cost_model.REASONS)


def test_memory_cost_of_full_pool() -> None:
    speed, aims = Speed(ForwardTimes(prompt_token_s=1e-4, step_s=0.01), output_steps=100.0), Objectives()
    full = Load(num_decoding=10, num_pool_tokens=10_000, num_held_tokens=10_000)
    assert cost_model.num_free_tokens(full) == 0
    assert cost_model.memory_cost(full, speed, aims, 0) == 0.0
    # An output takes 1 s, so a tenth of the held pages comes free in 0.1 s.
    assert cost_model.memory_cost(full, speed, aims, 1_000) == pytest.approx(0.1 / aims.ttft_s)
    empty = Load(num_pool_tokens=10_000)
    assert cost_model.memory_cost(empty, speed, aims, 9_000) == 0.0


def test_place_cost_of_full_batch() -> None:
    # 2 of 10 requests must end first. An output takes 100 steps of 10 ms: 0.2 s, 0.4 of the objective.
    speed = Speed(ForwardTimes(step_s=10e-3), output_steps=100.0)
    full = Load(num_decoding=11, max_decoding=10)
    assert cost_model.place_cost(full, speed, Objectives(0.5, 1.0)) == pytest.approx(0.4)
    assert cost_model.place_cost(Load(num_decoding=9, max_decoding=10), speed, Objectives(0.5, 1.0)) == 0.0


def test_worked_example() -> None:
    times = ForwardTimes(0.01, 1e-4, 1e-7, 0.008, 1e-3, 1e-7, gap_beside_prompts_s=0.04)
    speed, aims = Speed(times, output_steps=100.0), Objectives(ttft_s=0.5, itl_s=0.02)
    load = Load(num_pending_tokens=2_000, num_decoding=3, num_kv_tokens=10_000, lean="both")
    # 500 of 1,000 tokens: 500 * 1e-4 + 1e-7 * 500 * 750 = 0.0875 s. The queue takes 0.2 s.
    # Slow gaps miss the objective: 1 + (1 - 0.02 / 0.04) / 0.05 = 11.
    assert cost_model.prompt_parts(load, speed, aims, 500, 1_000) == pytest.approx(
        {
            "queue": 0.2 / 0.5,
            "load": 0.0,
            "compute": (0.01 + 0.0875) / 0.5 + 0.0875 / 0.5,
            "interference": 3 * 0.0875 / (100 * 0.02) * 11,
            "role": 1.5 * 0.0875 / 0.5,
        }
    )
    # A step of 4 requests takes 0.008 + 0.004 + 0.001 = 0.013 s, and 0.0001 s more with this request's tokens.
    assert cost_model.decode_parts(load, speed, aims, 1_000, 500) == pytest.approx(
        {
            "batch": 0.0131 / 0.02 + 3 * (1e-3 + 1e-4) / 0.02,
            "interference": 0.2 / (100 * 0.02) * 11,
            "memory": 0.0,
            "role": 0.7,
        }
    )
    assert cost_model.ttft_s(load, speed, 500, 1_000) == pytest.approx(0.2975)
    assert cost_model.itl_s(load, speed, 1_000) == pytest.approx(0.0131)


def test_time_beyond_objective_counts_five_times() -> None:
    speed, aims = Speed(ForwardTimes(prompt_token_s=1e-3)), Objectives(ttft_s=0.5)
    # 1 s is twice the objective: 1 + 5 for the first token, and 2 for the worker's time.
    assert cost_model.prefill_line(Load(), speed, aims).at(1.0) == pytest.approx(8.0)


def test_handover_line() -> None:
    # 10 ms and 0.1 ms for each page of 4 tokens, of a half second.
    assert cost_model.handover_line((0.01, 1e-4), 4, Objectives(0.5)) == pytest.approx((0.02, 5e-5))


def test_loading_overlaps_the_queue_and_delays_nobody_else() -> None:
    times = ForwardTimes(0.01, 1e-4, 1e-7, 0.008, 1e-3, 1e-7)
    speed, aims = Speed(times), Objectives(ttft_s=0.5, itl_s=0.02)
    load = Load(num_pending_tokens=2_000, num_decoding=3)
    # The queue takes 0.2 s, and 500 of 1,000 tokens 0.0875 s.
    plain = cost_model.prompt_parts(load, speed, aims, 500, 1_000)
    assert cost_model.prompt_parts(load, speed, aims, 500, 1_000, load_s=0.15) == plain
    waiting = cost_model.prompt_parts(load, speed, aims, 500, 1_000, load_s=0.3)
    assert waiting == pytest.approx({**plain, "load": 0.1 / 0.5})
    late = cost_model.prompt_parts(load, speed, aims, 500, 1_000, load_s=0.6)
    assert late == pytest.approx({**plain, "load": 1.2 + 4 * 0.2 - 0.4, "compute": 5 * 0.0975 / 0.5 + 0.0875 / 0.5})
    assert cost_model.ttft_s(load, speed, 500, 1_000, load_s=0.3) == pytest.approx(0.3 + 0.0975)
    assert cost_model.ttft_s(load, speed, 500, 1_000, load_s=0.1) == pytest.approx(0.2 + 0.0975)
