"""Which workers are to compute prompts mostly and which are to decode mostly, by what there is to do.

A worker that does both reads its weights for each piece of a prompt, where steps are not mixed again for each decode
step, and between two steps there is no more time than the objective leaves. One that does only the one or the other
does that once. So the more there is to do and the tighter the objective, the more is served by workers that lean.
What a layout can serve is reckoned in shares of one worker's time, `i` being FILLED of the objective for gaps, `T`
that for first tokens, `s0` what a decode step takes with nothing in it, `f0` what a forward of prompts does, and `f`
what the mean prompt takes besides:

| a worker that | has |
|---|---|
| leans to prefill | `(1 - (f + f0) / 2T) f / (f + f0)` for prompts: long ones wait longer in line |
| leans to decode | `1 - s0 / i` for requests that decode |
| does both | `1 - (s0 + f0) / i` for either; a prompt that takes `g` there counts for `1 / (1 - g / 2T)` |

A prompt that is computed beside decode steps has of that worker's time the share that prompts are of all that there is
to do. So `g` is more than `f`, and fewer of those can wait in line: where prompts are long this is why workers lean.
Where workers lean, prompts are computed by those that are there for it, whoever has them cached: a layout of such has
to compute of each what half of the workers or more would have to. This is why nobody leans where there are
conversations, which are cached where they were decoded.

What there is to do: the prompts of the last second or two, and the requests that are being decoded, each of which takes
its share of every step of length `i` and one of the places that memory and `--max-batch-size` leave. A plan is the
layout that would serve the largest multiple of that. As long as workers that all do both would serve much more than
there is, none leans: then whatever costs a request least is best. Nor does any where that would serve no more: that who
leans to decode has more requests in each step than the others is worth nothing by itself.
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

# Prompts of so long ago count for 1/e, in seconds.
MEMORY_S = 1.5
# Below the first multiple of what there is to do workers lean, and above the second they stop.
TIGHT = 2.0
LOOSE = 3.0
# In a plan workers must serve more by this factor than if all did both, or none leans.
WORTHWHILE = 1.02
# A layout must serve more than the one that there is by this share for each share of the workers that change.
CHANGE_COST = 0.2
# So long a plan holds, unless another one would serve CLEARLY times as much.
HOLD_S = 3.0
CLEARLY = 1.25
# Numbers of workers are tried in steps of this part of all.
NUM_STEPS = 16


class Layout(NamedTuple):
    """Numbers of workers that lean to prefill, to decode, and to neither."""

    prefill: int
    decode: int
    both: int

    def distance(self, other: "Layout") -> int:
        """Workers that change between the two."""
        return sum(abs(a - b) for a, b in zip(self, other, strict=True)) // 2


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is to do in a cluster, in one worker's time.

    Attributes:
        prompts: seconds of prompts for each second, without what a forward takes with nothing in it.
        leaning_prompts: as much, where workers lean, so that prompts are not computed where they are cached.
        requests: of each decode step's time, what the requests that are decoded take.
        places: of one worker's places for these, how many times as many are taken.
        prefill, decode, both: what a worker of each lean has for prompts, for requests, and for either.
        filled: of what a worker that does both has, what prompts can fill.
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
        """Of this demand that a layout would serve."""
        prefill, decode, both = layout.prefill * self.prefill, layout.decode * self.decode, layout.both * self.both
        prompts = self.leaning_prompts if prefill or decode else self.prompts
        # Of this demand's prompts, those that workers compute which do nothing else.
        apart = min(prefill, prompts)
        limits = (
            (prefill + self.filled * both, prompts),
            (decode + both, self.requests),
            (prefill + decode + both, apart + (prompts - apart) / self.filled + self.requests),
            (layout.decode + layout.both, self.places),
        )
        return min((have / need for have, need in limits if need > 0), default=math.inf)


class RolePlanner:
    """One for a cluster.

    Attributes:
        leans: of each worker, by its id.
    """

    def __init__(self, objectives: Objectives, clock: Callable[[], float]) -> None:
        self.leans: dict[str, Lean] = {}
        self._objectives = objectives
        self._clock = clock
        self._planned_at = self._changed_at = -math.inf
        self._seen: dict[str, RouterDemand] = {}
        # In a second, what `_counts` says.
        self._rates = [0.0] * 5

    def plan(self, demands: Mapping[str, RouterDemand]) -> Mapping[str, Lean]:
        """The leans from now on; to be called about twice a second.

        Args:
            demands: what each router says, by its name.
        """
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
        """None: nobody has said how fast workers are."""
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
        # Half of an output is there on average, and all of it has to fit in the end.
        requests_s = times.request_s * num_decoding + times.kv_token_s * (
            num_kv_tokens + num_decoding * output_tokens / 2
        )
        held_tokens = max(1.0, num_kv_tokens / num_decoding + output_tokens) if num_decoding else 1.0
        max_decoding = min((r.max_decoding for r in demands.values() if r.max_decoding), default=math.inf)
        places = min(max_decoding, pool_tokens / held_tokens)
        both = max(0.0, 1.0 - (times.step_s + times.prefill_s) / step_s)
        requests = requests_s / step_s
        # A prompt has its share of what is there for either.
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
        """Args: prompt_s: of the mean prompt."""
        whole_s = times.prefill_s + prompt_s
        if prompt_s <= 0:
            return 1.0
        return self._filled(whole_s) * prompt_s / whole_s

    def _filled(self, prompt_s: float) -> float:
        """Of a worker's time, what prompts can fill of which each takes so long: they wait for one another."""
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
    """Prompts, tokens of them, how many these attend to, and both where they are not computed where they are cached."""
    return (
        router.prompts,
        router.prompt_tokens,
        router.attended_tokens,
        router.elsewhere_tokens,
        router.elsewhere_attended,
    )


def _layouts(count: int, have: Layout) -> Iterator[Layout]:
    """Those that are looked at, the one that there is first. In each some compute prompts and some decode."""
    yield have
    step = -(-count // NUM_STEPS)
    for prefill in range(0, count, step):
        for decode in range(0, min(count, count + 1 - prefill), step):
            yield Layout(prefill, decode, count - prefill - decode)


def _layout_of(leans: Mapping[str, Lean]) -> Layout:
    counts = Counter(leans.values())
    return Layout(counts["prefill"], counts["decode"], counts["none"] + counts["both"])


def _assign(want: Layout, leans: Mapping[str, Lean], decoding: Mapping[str, int]) -> dict[str, Lean]:
    """As few change as possible; of those that may, the ones that decode most lean to that."""
    order = {"decode": 0, "none": 1, "both": 1, "prefill": 2}
    names = sorted(leans, key=lambda name: (order[leans[name]], -decoding[name], name))
    rest: Lean = "both" if want.prefill or want.decode else NO_LEAN
    kinds: list[Lean] = ["decode"] * want.decode
    kinds += [rest] * want.both
    kinds += ["prefill"] * want.prefill
    return dict(zip(names, kinds, strict=True))
