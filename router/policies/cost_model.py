"""The cost of serving a request at a worker, by the formula in docs/placement.md.

A cost of 1 is one request that takes exactly as long as its objective allows, for its first token or between two
tokens. Time beyond the objective counts LATE times. The cost includes the cost to the worker's other requests.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tandem.messages import ForwardTimes
from tandem.router.workers.leans import Lean
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.worker import Worker

LATE = 5.0
TAIL_SHARE = 0.05
# Parts of a cost. The reason for a placement is the part with its largest advantage. "only": there is no pair of the
# other placement.
REASONS = ("queue", "load", "compute", "interference", "handover", "batch", "memory", "role", "only")
# Cost of work against a worker's lean: of prefill times its share of the TTFT objective, of decode as it is.
LEAN_OF_PROMPT: Mapping[Lean, float] = {"none": 0.0, "prefill": 0.0, "both": 1.5, "decode": 5.0}
LEAN_OF_DECODING: Mapping[Lean, float] = {"none": 0.0, "decode": 0.0, "both": 0.7, "prefill": 3.0}
MIN_OUTPUT_STEPS = 8.0


class Load(NamedTuple):
    """The work of one worker.

    Attributes:
        num_pending_tokens: queued prompt tokens.
        num_decoding: requests in decode or bound for it.
        num_kv_tokens: KV tokens of these requests.
        num_held_tokens: tokens of the pool in use or promised.
        max_decoding: largest decode batch, in requests.
    """

    num_pending_tokens: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_pool_tokens: int = 2**62
    num_held_tokens: int = 0
    max_decoding: int = 2**31
    lean: Lean = "none"


class Speed(NamedTuple):
    """
    Attributes:
        output_steps: decode steps of a mean output.
        num_drafts: of a request and step; each takes the time of one more request.
    """

    times: ForwardTimes
    output_steps: float = 128.0
    num_drafts: float = 0.0

    @property
    def request_s(self) -> float:
        return self.times.request_s * (1.0 + self.num_drafts)


class CostLine(NamedTuple):
    """`late(due + due_slope * amount) + extra + extra_slope * amount` for an amount of work."""

    due: float
    due_slope: float
    extra: float
    extra_slope: float

    def at(self, amount: float) -> float:
        return late(self.due + self.due_slope * amount) + self.extra + self.extra_slope * amount


def state_of(worker: Worker) -> tuple[Load, Speed]:
    load = Load(
        worker.num_pending_tokens,
        worker.num_decoding,
        worker.num_kv_tokens,
        worker.num_pool_tokens,
        worker.num_held_tokens,
        worker.max_decoding,
        worker.lean,
    )
    return load, Speed(worker.forward_times, worker.rates.mean_output_steps, worker.rates.mean_drafts)


def late(share: float) -> float:
    """Returns the cost of a share of an objective."""
    return share if share <= 1.0 else LATE * share - (LATE - 1.0)


def compute_s(speed: Speed, num_to_compute: int, num_tokens: int) -> float:
    """Returns the seconds to compute the last tokens of a prompt, without a forward pass's fixed time."""
    times = speed.times
    return num_to_compute * (times.prompt_token_s + times.attended_token_s * (num_tokens - 0.5 * num_to_compute))


def prefill_line(load: Load, speed: Speed, objectives: Objectives) -> CostLine:
    """Cost of a prompt by the seconds of `compute_s`."""
    ttft_s = objectives.ttft_s
    return CostLine(
        due=(_queue_s(load, speed) + speed.times.prefill_s) / ttft_s,
        due_slope=1.0 / ttft_s,
        extra=0.0,
        extra_slope=1.0 / ttft_s
        + load.num_decoding * _delay(1.0, speed, objectives)
        + _prompt_lean(load, objectives, 1.0),
    )


def loaded_prefill_line(line: CostLine, queue_s: float, load_s: float, objectives: Objectives) -> CostLine:
    """Returns `prefill_line` of a prompt that first loads for `load_s`. Loading begins with queueing and takes no time
    of the engine."""
    due, *others = line
    return CostLine(due + max(0.0, load_s - queue_s) / objectives.ttft_s, *others)


def decode_line(load: Load, speed: Speed, objectives: Objectives) -> CostLine:
    """Cost of a request by its tokens, without `memory_cost`."""
    times, objective_s = speed.times, objectives.itl_s
    step_s = itl_s(load, speed, 0)
    others = (LATE if step_s > objective_s else 1.0) * load.num_decoding / objective_s
    return CostLine(
        due=step_s / objective_s,
        due_slope=times.kv_token_s / objective_s,
        extra=_delay(_queue_s(load, speed), speed, objectives)
        + others * speed.request_s
        + place_cost(load, speed, objectives)
        + LEAN_OF_DECODING[load.lean],
        extra_slope=others * times.kv_token_s,
    )


def place_cost(load: Load, speed: Speed, objectives: Objectives) -> float:
    """Wait for a place in the batch: requests leave at an even rate over one output's time."""
    lacking = load.num_decoding + 1 - load.max_decoding
    if lacking <= 0:
        return 0.0
    return late(lacking / load.max_decoding * speed.output_steps * itl_s(load, speed, 0) / objectives.ttft_s)


def memory_cost(load: Load, speed: Speed, objectives: Objectives, num_to_store: int) -> float:
    """Wait for pages for `num_to_store` tokens: held pages come free at an even rate over one output's time."""
    held = load.num_held_tokens
    lacking = num_to_store - num_free_tokens(load)
    if lacking <= 0 or held <= 0:
        return 0.0
    step_s = _step_s(speed, load.num_decoding, load.num_kv_tokens)
    return late(min(1.0, lacking / held) * speed.output_steps * step_s / objectives.ttft_s)


def num_free_tokens(load: Load) -> int:
    return load.num_pool_tokens - load.num_held_tokens


def handover_line(handover: tuple[float, float], page_size: int, objectives: Objectives) -> tuple[float, float]:
    """Returns the cost of a handover, and of each token to ship.

    Args:
        handover: seconds of a handover, and of each page.
    """
    fixed_s, page_s = handover
    return fixed_s / objectives.ttft_s, page_s / (page_size * objectives.ttft_s)


def ttft_s(load: Load, speed: Speed, num_to_compute: int, num_tokens: int, load_s: float = 0.0) -> float:
    waited = max(_queue_s(load, speed), load_s)
    return waited + speed.times.prefill_s + compute_s(speed, num_to_compute, num_tokens)


def itl_s(load: Load, speed: Speed, num_tokens: int) -> float:
    """Seconds between tokens with one more request of `num_tokens` tokens, without delays by prompts."""
    return _step_s(speed, load.num_decoding + 1, load.num_kv_tokens + num_tokens)


def prompt_parts(
    load: Load, speed: Speed, objectives: Objectives, num_to_compute: int, num_tokens: int, load_s: float = 0.0
) -> dict[str, float]:
    """Splits `loaded_prefill_line` by cause."""
    seconds = compute_s(speed, num_to_compute, num_tokens)
    queue = late(_queue_s(load, speed) / objectives.ttft_s)
    loading = late(max(_queue_s(load, speed), load_s) / objectives.ttft_s) - queue
    interference = load.num_decoding * _delay(seconds, speed, objectives)
    role = _prompt_lean(load, objectives, seconds)
    line = prefill_line(load, speed, objectives)
    cost = loaded_prefill_line(line, _queue_s(load, speed), load_s, objectives).at(seconds)
    return {
        "queue": queue,
        "load": loading,
        "compute": cost - queue - loading - interference - role,
        "interference": interference,
        "role": role,
    }


def decode_parts(
    load: Load, speed: Speed, objectives: Objectives, num_tokens: int, num_to_store: int
) -> dict[str, float]:
    """Splits `decode_line` and `memory_cost` by cause. The wait for a place belongs to "batch"."""
    interference = _delay(_queue_s(load, speed), speed, objectives)
    role = LEAN_OF_DECODING[load.lean]
    return {
        "batch": decode_line(load, speed, objectives).at(num_tokens) - interference - role,
        "interference": interference,
        "memory": memory_cost(load, speed, objectives, num_to_store),
        "role": role,
    }


def _prompt_lean(load: Load, objectives: Objectives, seconds: float) -> float:
    return LEAN_OF_PROMPT[load.lean] * seconds / objectives.ttft_s


def _step_s(speed: Speed, num_requests: int, num_kv_tokens: int) -> float:
    times = speed.times
    return times.step_s + speed.request_s * num_requests + times.kv_token_s * num_kv_tokens


def _queue_s(load: Load, speed: Speed) -> float:
    """Seconds to compute the queued prompts."""
    return speed.times.prompt_token_s * load.num_pending_tokens


def _delay(seconds: float, speed: Speed, objectives: Objectives) -> float:
    """Cost of `seconds` of prefill to one request decoded beside it. If mixed steps exceed the objective, a TAIL_SHARE
    of slow gaps already misses it."""
    mean = seconds / (max(MIN_OUTPUT_STEPS, speed.output_steps) * objectives.itl_s)
    gap_s = speed.times.gap_beside_prompts_s
    if gap_s <= objectives.itl_s:
        return mean
    return mean * (1.0 + (1.0 - objectives.itl_s / gap_s) / TAIL_SHARE)
