"""Plans which workers lean to prefill, which lean to decode, and which do both.

A worker that does both reads its weights for each chunk and, without mixed steps, again for each decode step. Between
two steps it has only the time that the ITL objective leaves. So high load and tight objectives favor leaning.

deploy/supervise/capacities.py has the capacities. With leans, prompts miss other workers' caches: no worker leans for
conversations.

Demand is the prompts of the last one or two seconds, and the decoding requests. The plan is the layout that
serves the largest multiple of the demand. No worker leans if workers that do both serve a multiple well above 1, or as
much as others.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain

from tandem.deploy.supervise.capacities import DecodingLoad, Demand, Layout, PromptRates, layouts
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
        load = DecodingLoad(
            sum(sum(router.num_decoding.values()) for router in demands.values()),
            sum(router.num_kv_tokens for router in demands.values()),
            max(router.output_tokens for router in demands.values()),
            min((r.pool_tokens for r in demands.values() if r.pool_tokens), default=math.inf),
            min((r.max_decoding for r in demands.values() if r.max_decoding), default=math.inf),
        )
        return Demand.of(times, self._objectives, PromptRates(*self._rates), load)

    def _best(self, demand: Demand, have: Layout, *, is_held: bool) -> Layout:
        count = sum(have)
        alike = Layout(0, 0, count)
        if demand.multiple(alike) > (TIGHT if have == alike else LOOSE):
            return have if is_held else alike
        best = max(
            chain([have], layouts(count)),
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
