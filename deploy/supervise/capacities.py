"""Capacities of workers and the demand on them, for the planners of roles and of sizes.

Capacities are shares of one worker's time. `i` is FILLED times the ITL objective and `T` the TTFT objective. An
empty decode step takes `s0`, an empty prefill forward pass `f0`, and the mean prompt adds `f`:

| worker | capacity |
|---|---|
| leans to prefill | `(1 - (f + f0) / 2T) f / (f + f0)` for prompts: long ones queue longer |
| leans to decode | `1 - s0 / i` for decoding requests |
| does both | `1 - (s0 + f0) / i` for either; a prompt that takes `g` there counts `1 / (1 - g / 2T)` times |

Beside decode steps, prompts get their share of all demand. So `g` exceeds `f`, and fewer prompts can queue: this favors
leaning for long prompts. Workers that lean to prefill recompute prefixes that other workers have cached. So a layout
with leans is charged the uncached part of each prompt at the median worker.

Each request takes a share of every step of length `i`, and a place within memory and `--max-batch-size`. Fixed roles
count as leans.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tandem.both_worker.step_budget import FILLED
from tandem.messages import ForwardTimes
from tandem.router.workers.objectives import Objectives

# Parts into which `layouts` divides many workers.
NUM_STEPS = 16


class Layout(NamedTuple):
    prefill: int
    decode: int
    both: int

    def distance(self, other: "Layout") -> int:
        return sum(abs(a - b) for a, b in zip(self, other, strict=True)) // 2


class PromptRates(NamedTuple):
    """Prompts and tokens per second.

    Attributes:
        tokens: not expected to be cached.
        attended: sum of the tokens that each of these attends to.
        elsewhere, elsewhere_attended: the same for tokens uncached at half of the workers or more.
    """

    prompts: float = 0.0
    tokens: float = 0.0
    attended: float = 0.0
    elsewhere: float = 0.0
    elsewhere_attended: float = 0.0


class DecodingLoad(NamedTuple):
    """
    Attributes:
        num_requests: decoding requests.
        num_kv_tokens: tokens of their prompts.
        output_tokens: mean output length.
        pool_tokens: tokens of one worker's pool.
        max_requests: limit of one worker's batch.
    """

    num_requests: float
    num_kv_tokens: float
    output_tokens: float
    pool_tokens: float = math.inf
    max_requests: float = math.inf


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a cluster and capacities of its workers, in shares of one worker's time.

    Attributes:
        prompts: prefill time per second, without the time of empty forward passes.
        leaning_prompts: the same if workers lean and prompts miss other workers' caches.
        requests: decoding requests' share of each decode step.
        places: decoding requests, in multiples of one worker's places.
        filled: share of the capacity `both` that prompts can fill.
    """

    prompts: float
    leaning_prompts: float
    requests: float
    places: float
    prefill: float
    decode: float
    both: float
    filled: float

    @classmethod
    def of(cls, times: ForwardTimes, objectives: Objectives, rates: PromptRates, load: DecodingLoad) -> "Demand":
        step_s = FILLED * objectives.itl_s
        prompt_s = times.prompt_token_s * rates.tokens + times.attended_token_s * rates.attended
        leaning_s = times.prompt_token_s * rates.elsewhere + times.attended_token_s * rates.elsewhere_attended
        # On average half of an output is cached; in the end all of it must fit.
        requests_s = times.request_s * load.num_requests + times.kv_token_s * (
            load.num_kv_tokens + load.num_requests * load.output_tokens / 2
        )
        held_tokens = 1.0
        if load.num_requests > 0:
            held_tokens = max(1.0, load.num_kv_tokens / load.num_requests + load.output_tokens)
        places = min(load.max_requests, load.pool_tokens / held_tokens)
        both = max(0.0, 1.0 - (times.step_s + times.prefill_s) / step_s)
        requests = requests_s / step_s
        beside_s = (prompt_s + requests) / (rates.prompts * both) if prompt_s > 0 and both > 0 else 0.0
        dearest_s = max(prompt_s, leaning_s)
        return cls(
            prompts=prompt_s,
            leaning_prompts=dearest_s,
            requests=requests,
            places=load.num_requests / max(1.0, places),
            prefill=_prefill_share(times, dearest_s / rates.prompts if prompt_s > 0 else 0.0, objectives.ttft_s),
            decode=max(0.0, 1.0 - times.step_s / step_s),
            both=both,
            filled=_filled(beside_s, objectives.ttft_s),
        )

    def multiple(self, layout: Layout) -> float:
        """Returns the multiple of this demand that the workers of a layout serve."""
        prefill, decode, both = layout.prefill * self.prefill, layout.decode * self.decode, layout.both * self.both
        prompts = self.leaning_prompts if prefill or decode else self.prompts
        apart = min(prefill, prompts)
        limits = (
            (prefill + self.filled * both, prompts),
            (decode + both, self.requests),
            (prefill + decode + both, apart + (prompts - apart) / self.filled + self.requests),
            (layout.decode + layout.both, self.places),
        )
        return min((have / need for have, need in limits if need > 0), default=math.inf)


def layouts(count: int) -> Iterator[Layout]:
    """Returns layouts of `count` workers, all of them for few workers."""
    step = -(-count // NUM_STEPS)
    for prefill in range(0, count, step):
        for decode in range(0, min(count, count + 1 - prefill), step):
            yield Layout(prefill, decode, count - prefill - decode)


def _prefill_share(times: ForwardTimes, prompt_s: float, ttft_s: float) -> float:
    whole_s = times.prefill_s + prompt_s
    if prompt_s <= 0:
        return 1.0
    return _filled(whole_s, ttft_s) * prompt_s / whole_s


def _filled(prompt_s: float, ttft_s: float) -> float:
    """Returns the share of a worker's time that prompts of this length can fill, as they queue."""
    return max(0.5, 1.0 - prompt_s / (2 * ttft_s))
