"""What it costs to have a request served by a worker: functions of numbers alone, in no unit but objectives.

A cost of 1 is one request that takes as long as its objective allows, for its first token or between its tokens; beyond
the objective each further part counts LATE times as much. What a choice costs is what it costs all requests: the one
that is chosen for, and those whose worker it keeps busy. With these numbers

| | |
|---|---|
| `T`, `I` | the objectives, `--ttft-objective` and `--itl-objective`, in seconds |
| `q` | prompt tokens that the worker has yet to compute |
| `n`, `k` | requests that it decodes, and tokens of their KV |
| `f(x)` | seconds in which it computes the last `x` of `l` prompt tokens: `f0 + f1 x + f2 x (l - x/2)` |
| `s0 + s1 n + s2 k` | seconds of one of its decode steps |
| `g` | mean seconds between its steps while it computes prompts too |
| `h0 + h1 p` | seconds of a handover of `p` pages to another worker |
| `o` | tokens of a mean output |
| `late(z)` | `z`, and where that is more than 1, `(LATE - 1) (z - 1)` more |

a prompt of `l` tokens of which `x` are not cached costs at its prefill worker

    late((f1 q + f(x)) / T)                         its own first token
    + (f(x) - f0) / T                               the worker's time, which those who come next wait for
    + (f(x) - f0) n / (o I) * (1 + miss)            those who are decoded there: so much longer are their mean gaps

and a request of `l` tokens costs at its decode worker

    late((s0 + s1 (n + 1) + s2 (k + l)) / I)        its own gaps
    + f1 q / (o I) * (1 + miss)                     the prompts that are yet to be computed there
    + n (s1 + s2 l) / I                             longer steps of the others, LATE times where they are late
    + the wait for a place / T                      where all are taken that the steps have
    + the wait for memory / T                       where the pool has too little left

where `miss = max(0, 1 - I / g) / 0.05`: if steps with prompts in them take longer than the objective allows, it is
missed as soon as they are one in twenty. If the two are not the same worker, a handover is added: `(h0 + h1 p) / T`.

A worker that leans to one kind of work costs more for the other: LEAN_OF_PROMPT for each part of `T` that computing the
prompt takes, LEAN_OF_DECODING for the request.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tandem.messages import ForwardTimes
from tandem.router.workers.leans import Lean
from tandem.router.workers.objectives import Objectives

# So many times as much does what is late count. Objectives are there to be kept.
LATE = 5.0
# An objective for gaps is kept or missed by the one in twenty that is the longest.
TAIL_SHARE = 0.05
# Why one placement was chosen and not the other: the part of its cost that is smaller by most; "only": there was no
# pair of the other placement.
REASONS = ("queue", "compute", "interference", "handover", "batch", "memory", "role", "only")
# What a worker's lean adds. Where others lean to a kind of work, one that takes either comes after them.
LEAN_OF_PROMPT: Mapping[Lean, float] = {"none": 0.0, "prefill": 0.0, "both": 1.5, "decode": 5.0}
LEAN_OF_DECODING: Mapping[Lean, float] = {"none": 0.0, "decode": 0.0, "both": 0.7, "prefill": 3.0}
# A mean output is taken to have so many tokens at least: of very short ones nothing could be said.
MIN_OUTPUT_TOKENS = 8.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do.

    Attributes:
        num_pending_tokens: prompt tokens that it has yet to compute.
        num_decoding: requests that it decodes, or is going to.
        num_kv_tokens: tokens of their KV.
        num_pool_tokens: tokens that its pool holds.
        num_held_tokens: those of them that nobody else can have.
        max_decoding: requests that it decodes side by side at most.
        lean: which work it is to be given first.
    """

    num_pending_tokens: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_pool_tokens: int = 2**62
    num_held_tokens: int = 0
    max_decoding: int = 2**31
    lean: Lean = "none"


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast it is.

    Attributes:
        times: of its forwards, by its own word.
        output_tokens: of a mean output.
    """

    times: ForwardTimes
    output_tokens: float = 128.0


class PromptCost(NamedTuple):
    """What a prompt costs at its prefill worker.

    Attributes:
        wait: for what comes before it, its own forward's fixed part included.
        token, attended: of each token to compute, and of each that one of these attends to. These three are shares of
            the objective for the first token.
        others: what all others lose by each such share that computing it takes.
        extra: is added as it is.
    """

    wait: float
    token: float
    attended: float
    others: float
    extra: float = 0.0

    def at(self, num_to_compute: int, num_tokens: int) -> float:
        """Args: num_tokens: of the prompt, of which the last are to be computed."""
        return prompt_costs((self,), (num_to_compute,), num_tokens)[0]


def prompt_costs(costs: Iterable[PromptCost], nums_to_compute: Iterable[int], num_tokens: int) -> list[float]:
    """What the same prompt costs at several workers. Args: nums_to_compute: of its tokens, at each of them."""
    more = LATE - 1.0
    # `late`, without a call for each: there may be hundreds.
    return [
        (due if (due := wait + (own := x * (token + attended * (num_tokens - 0.5 * x)))) <= 1.0 else LATE * due - more)
        + others * own
        + extra
        for (wait, token, attended, others, extra), x in zip(costs, nums_to_compute, strict=True)
    ]


class Line(NamedTuple):
    """A cost that rises with a number of tokens.

    Attributes:
        due, due_slope: what stands against an objective.
        extra, extra_slope: what is added as it is.
    """

    due: float
    due_slope: float
    extra: float
    extra_slope: float

    def at(self, num_tokens: float) -> float:
        return line_costs((self,), num_tokens)[0]


def line_costs(lines: Iterable[Line], num_tokens: float) -> list[float]:
    """The costs of as many tokens by several lines."""
    more = LATE - 1.0
    return [
        (share if (share := due + slope * num_tokens) <= 1.0 else LATE * share - more) + extra + more_each * num_tokens
        for due, slope, extra, more_each in lines
    ]


def late(due: float) -> float:
    """A share of an objective as a cost."""
    return due if due <= 1.0 else due + (LATE - 1.0) * (due - 1.0)


def prompt_cost(load: Load, speed: Speed, objectives: Objectives) -> PromptCost:
    """The cost of a prompt at its prefill worker."""
    times, ttft_s = speed.times, objectives.ttft_s
    return PromptCost(
        wait=(times.prompt_token_s * load.num_pending_tokens + times.prefill_s) / ttft_s,
        token=times.prompt_token_s / ttft_s,
        attended=times.attended_token_s / ttft_s,
        others=1.0 + LEAN_OF_PROMPT[load.lean] + load.num_decoding * _delay(ttft_s, speed, objectives),
    )


def decode_line(load: Load, speed: Speed, objectives: Objectives) -> Line:
    """The cost of a request at its decode worker, by its tokens; without what memory it may have to wait for."""
    request, token = speed.times.request_s, speed.times.kv_token_s
    step = itl_s(load, speed, 0)
    weight = LATE if step > objectives.itl_s else 1.0
    others = weight * load.num_decoding / objectives.itl_s
    return Line(
        due=step / objectives.itl_s,
        due_slope=token / objectives.itl_s,
        extra=_delay(_queue_s(load, speed), speed, objectives)
        + others * request
        + place_cost(load, speed, objectives)
        + LEAN_OF_DECODING[load.lean],
        extra_slope=others * token,
    )


def place_cost(load: Load, speed: Speed, objectives: Objectives) -> float:
    """Of the wait for a place in the steps: those that are decoded leave theirs evenly over the time that their outputs
    take."""
    lacking = load.num_decoding + 1 - load.max_decoding
    if lacking <= 0:
        return 0.0
    return late(lacking / load.max_decoding * speed.output_tokens * itl_s(load, speed, 0) / objectives.ttft_s)


def memory_cost(load: Load, speed: Speed, objectives: Objectives, num_to_store: int) -> float:
    """Of the wait for pages: those that are decoded leave theirs evenly over the time that their outputs take.

    Args:
        num_to_store: tokens of the request that are not cached there.
    """
    held = load.num_held_tokens
    lacking = num_to_store - num_free_tokens(load)
    if lacking <= 0 or held <= 0:
        return 0.0
    times = speed.times
    step = times.step_s + times.request_s * load.num_decoding + times.kv_token_s * load.num_kv_tokens
    return late(min(1.0, lacking / held) * speed.output_tokens * step / objectives.ttft_s)


def num_free_tokens(load: Load) -> int:
    """Tokens of a request for which there is room now."""
    return load.num_pool_tokens - load.num_held_tokens


def handover_cost(handover: tuple[float, float], num_pages: float, objectives: Objectives) -> float:
    """Args: handover: seconds of each, and of each page."""
    return (handover[0] + handover[1] * num_pages) / objectives.ttft_s


def ttft_s(load: Load, speed: Speed, num_to_compute: int, num_tokens: int) -> float:
    """Seconds until a prompt's first token is there. Args: num_to_compute: of its tokens, those that are not cached."""
    times = speed.times
    each_s = times.prompt_token_s + times.attended_token_s * (num_tokens - 0.5 * num_to_compute)
    return _queue_s(load, speed) + times.prefill_s + num_to_compute * each_s


def itl_s(load: Load, speed: Speed, num_tokens: int) -> float:
    """Mean seconds between two tokens of one more request of so many tokens, but for what prompts add to it."""
    times = speed.times
    return (
        times.step_s + times.request_s * (load.num_decoding + 1) + times.kv_token_s * (load.num_kv_tokens + num_tokens)
    )


def prompt_terms(
    load: Load, speed: Speed, objectives: Objectives, num_to_compute: int, num_tokens: int
) -> dict[str, float]:
    """What a PromptCost adds up: what waits before it, what it takes itself, what others lose, and the lean."""
    cost = prompt_cost(load, speed, objectives)
    queue = late(_queue_s(load, speed) / objectives.ttft_s)
    computing = (ttft_s(load, speed, num_to_compute, num_tokens) / objectives.ttft_s) - cost.wait
    role = LEAN_OF_PROMPT[load.lean] * computing
    disturbed = (cost.others - 1.0) * computing - role
    return {
        "queue": queue,
        "compute": cost.at(num_to_compute, num_tokens) - queue - disturbed - role,
        "interference": disturbed,
        "role": role,
    }


def decode_terms(
    load: Load, speed: Speed, objectives: Objectives, num_tokens: int, num_to_store: int
) -> dict[str, float]:
    """What `decode_line` and `memory_cost` add up: its steps and the wait for a place in them, what prompts do to them,
    the wait for pages, and the lean."""
    disturbed = _delay(_queue_s(load, speed), speed, objectives)
    role = LEAN_OF_DECODING[load.lean]
    return {
        "batch": decode_line(load, speed, objectives).at(num_tokens) - disturbed - role,
        "interference": disturbed,
        "memory": memory_cost(load, speed, objectives, num_to_store),
        "role": role,
    }


def _queue_s(load: Load, speed: Speed) -> float:
    """Seconds of the prompts that are yet to be computed there."""
    return speed.times.prompt_token_s * load.num_pending_tokens


def _delay(seconds: float, speed: Speed, objectives: Objectives) -> float:
    """What it costs one request that is decoded if prompts are computed beside it for so long."""
    mean = seconds / (max(MIN_OUTPUT_TOKENS, speed.output_tokens) * objectives.itl_s)
    gap_s = speed.times.gap_beside_prompts_s
    if gap_s <= objectives.itl_s:
        return mean
    return mean * (1.0 + (1.0 - objectives.itl_s / gap_s) / TAIL_SHARE)
