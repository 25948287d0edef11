"""Plans which workers lean to prefill, which lean to decode, and which do both.

A worker that does both reads its weights for each chunk and, without mixed steps, again for each decode step. Between
two steps it has only the time that the ITL objective leaves. So high load and tight objectives favor leaning.

Capacities are shares of one worker's time. `i` is FILLED times the ITL objective and `T` the TTFT objective. An
empty decode step takes `s0`, an empty prefill forward pass `f0`, and the mean prompt adds `f`:

| worker | capacity |
|---|---|
| leans to prefill | `(1 - (f + f0) / 2T) f / (f + f0)` for prompts: long ones queue longer |
| leans to decode | `1 - s0 / i` for decoding requests |
| does both | `1 - (s0 + f0) / i` for either; a prompt that takes `g` there counts `1 / (1 - g / 2T)` times |

Beside decode steps, prompts get their share of all demand. So `g` exceeds `f`, and fewer prompts can queue: this favors
leaning for long prompts. Workers that lean to prefill recompute prefixes that other workers have cached. So a layout
with leans is charged the uncached part of each prompt at the median worker: no worker leans for conversations.

Demand is the prompts of the last one or two seconds, and the decoding requests. Each request takes a share of every
step of length `i`, and a place within memory and `--max-batch-size`. The plan is the layout that serves the largest
multiple of the demand. No worker leans if workers that do both serve a multiple well above 1, or as much as others.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tandem.both_worker.step_budget import FILLED
from tandem.messages import ForwardTimes
from tandem.router.workers.leans import NO_LEAN, Lean, RouterDemand
from tandem.router.workers.objectives import Objectives

# Seconds until prompts weigh 1/e.
MEMORY_S = 1.5
# Workers start to lean below the first multiple of the demand and stop above the second.
TIGHT = 2.0
LOOSE = 3.0
# Minimum gain of leaning over workers that all do both.
WORTHWHILE = 1.02
# Relative gain required to change all workers; in proportion for fewer.
CHANGE_COST = 0.2
# Minimum life of a plan, unless another one serves CLEARLY times as much.
HOLD_S = 3.0
CLEARLY = 1.25
NUM_STEPS = 16


class Layout(NamedTuple):
    prefill: int
    decode: int
    both: int

    def distance(self, other: "Layout") -> int:
        return sum(abs(a - b) for a, b in zip(self, other, strict=True)) // 2


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

    def multiple(self, layout: Layout) -> float:
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


class RolePlanner:
    def __init__(self, objectives: Objectives, clock: Callable[[], float]) -> None:
        self.leans: dict[str, Lean] = {}
        self._objectives = objectives
        self._clock = clock
        self._planned_at = self._changed_at = -math.inf
        self._seen: dict[str, RouterDemand] = {}
        self._rates = [0.0] * 5

    def plan(self, demands: Mapping[str, RouterDemand]) -> Mapping[str, Lean]:
        """Returns the new leans by worker id. Args: demands: by router."""
        now = self._clock()
        self._count_prompts(demands, now)
        decoding: Counter[str] = Counter()
        for router in demands.values():
            decoding.update(router.num_decoding)
        leans = {name: self.leans.get(name, NO_LEAN) for name in sorted(decoding)}
        have = _layout_of(leans)
        if len(leans) > 1 and (demand := self._demand(demands)) is not None:
            want = self._best(demand, have, is_held=now < self._changed_at + HOLD_S)
            if want != have:
                self._changed_at = now
            leans = _assign(want, leans, decoding)
        self.leans = leans
        return leans

    def _count_prompts(self, demands: Mapping[str, RouterDemand], now: float) -> None:
        elapsed_s, self._planned_at = now - self._planned_at, now
        new = [0] * len(self._rates)
        for name, router in demands.items():
            before = self._seen.get(name)
            counts = _counts(router)
            if before is not None and before.prompts <= router.prompts:
                new = [total + count - was for total, count, was in zip(new, counts, _counts(before), strict=True)]
        self._seen = dict(demands)
        if 0 < elapsed_s < math.inf:
            news = 1.0 - math.exp(-elapsed_s / MEMORY_S)
            self._rates = [
                rate + news * (count / elapsed_s - rate) for rate, count in zip(self._rates, new, strict=True)
            ]

    def _demand(self, demands: Mapping[str, RouterDemand]) -> Demand | None:
        """Returns None until a worker has published its timings."""
        times = next((router.times for router in demands.values() if router.times.step_s > 0), None)
        if times is None:
            return None
        step_s = FILLED * self._objectives.itl_s
        num_decoding = sum(sum(router.num_decoding.values()) for router in demands.values())
        num_kv_tokens = sum(router.num_kv_tokens for router in demands.values())
        output_tokens = max(router.output_tokens for router in demands.values())
        pool_tokens = min((r.pool_tokens for r in demands.values() if r.pool_tokens), default=math.inf)
        prompts, tokens, attended, elsewhere, elsewhere_attended = self._rates
        prompt_s = times.prompt_token_s * tokens + times.attended_token_s * attended
        leaning_s = times.prompt_token_s * elsewhere + times.attended_token_s * elsewhere_attended
        # On average half of an output is cached; in the end all of it must fit.
        requests_s = times.request_s * num_decoding + times.kv_token_s * (
            num_kv_tokens + num_decoding * output_tokens / 2
        )
        held_tokens = max(1.0, num_kv_tokens / num_decoding + output_tokens) if num_decoding else 1.0
        max_decoding = min((r.max_decoding for r in demands.values() if r.max_decoding), default=math.inf)
        places = min(max_decoding, pool_tokens / held_tokens)
        both = max(0.0, 1.0 - (times.step_s + times.prefill_s) / step_s)
        requests = requests_s / step_s
        beside_s = (prompt_s + requests) / (prompts * both) if prompts > 0 and both > 0 else 0.0
        return Demand(
            prompts=prompt_s,
            leaning_prompts=max(prompt_s, leaning_s),
            requests=requests,
            places=num_decoding / max(1.0, places),
            prefill=self._prefill_share(times, max(prompt_s, leaning_s) / prompts if prompts > 0 else 0.0),
            decode=max(0.0, 1.0 - times.step_s / step_s),
            both=both,
            filled=self._filled(beside_s),
        )

    def _prefill_share(self, times: ForwardTimes, prompt_s: float) -> float:
        whole_s = times.prefill_s + prompt_s
        if prompt_s <= 0:
            return 1.0
        return self._filled(whole_s) * prompt_s / whole_s

    def _filled(self, prompt_s: float) -> float:
        """Returns the share of a worker's time that prompts of this length can fill, as they queue."""
        return max(0.5, 1.0 - prompt_s / (2 * self._objectives.ttft_s))

    def _best(self, demand: Demand, have: Layout, *, is_held: bool) -> Layout:
        count = sum(have)
        alike = Layout(0, 0, count)
        if demand.multiple(alike) > (TIGHT if have == alike else LOOSE):
            return have if is_held else alike
        best = max(
            _layouts(count, have),
            key=lambda layout: demand.multiple(layout) / (1.0 + CHANGE_COST * layout.distance(have) / max(1, count)),
        )
        if demand.multiple(best) < WORTHWHILE * demand.multiple(alike):
            best = alike
        if is_held and demand.multiple(best) < CLEARLY * demand.multiple(have):
            return have
        return best


def _counts(router: RouterDemand) -> tuple[int, ...]:
    return (
        router.prompts,
        router.prompt_tokens,
        router.attended_tokens,
        router.elsewhere_tokens,
        router.elsewhere_attended,
    )


def _layouts(count: int, have: Layout) -> Iterator[Layout]:
    yield have
    step = -(-count // NUM_STEPS)
    for prefill in range(0, count, step):
        for decode in range(0, min(count, count + 1 - prefill), step):
            yield Layout(prefill, decode, count - prefill - decode)


def _layout_of(leans: Mapping[str, Lean]) -> Layout:
    counts = Counter(leans.values())
    return Layout(counts["prefill"], counts["decode"], counts["none"] + counts["both"])


def _assign(want: Layout, leans: Mapping[str, Lean], decoding: Mapping[str, int]) -> dict[str, Lean]:
    """Changes as few workers as possible; the busiest decoders lean to decode."""
    order = {"decode": 0, "none": 1, "both": 1, "prefill": 2}
    names = sorted(leans, key=lambda name: (order[leans[name]], -decoding[name], name))
    rest: Lean = "both" if want.prefill or want.decode else NO_LEAN
    kinds: list[Lean] = ["decode"] * want.decode
    kinds += [rest] * want.both
    kinds += ["prefill"] * want.prefill
    return dict(zip(names, kinds, strict=True))
