"""Computes the fewest workers that serve a rate of requests within the objectives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.both_worker.step_budget import FILLED
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.supervise.capacities import DecodingLoad, Demand, Layout, PromptRates
from tandem.messages import ForwardTimes
from tandem.router.workers.objectives import Objectives

# Share of requests that may miss an objective, and the deviations of a Poisson number that leave it.
LATE_SHARE, DEVIATIONS = 0.1, 1.3
# Least share of their time that prompts can fill, however long they are.
LEAST_FILLED = 0.5
# With more workers, prompts hardly wait before all are busy.
MANY = 1024
ANY_NUMBER = 2**31
_BISECTIONS = 12


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """The mean request, and the workers' limits.

    Attributes:
        tokens, attended, elsewhere, elsewhere_attended: work of a prompt, as in PromptRates.
        context: tokens of a prompt, for decoding.
        output, steps: output tokens, and decode steps for them.
        pool_tokens, max_requests: as in DecodingLoad.
    """

    tokens: float
    attended: float
    elsewhere: float
    elsewhere_attended: float
    context: float
    output: float
    steps: float
    pool_tokens: float = math.inf
    max_requests: float = math.inf


class WorkerNeeds:
    """Needs at measured forward times. Rates are requests per second that arrive independently.

    An ITL objective that an idle worker misses counts as twice the time of its empty step: no number of workers meets
    it.
    """

    def __init__(self, times: ForwardTimes, objectives: Objectives, request: MeanRequest) -> None:
        self._times = times
        least_itl_s = 2 * (times.step_s + times.prefill_s) / FILLED
        self._objectives = replace(objectives, itl_s=max(objectives.itl_s, least_itl_s))
        self._request = request

    def fewest(self, rate: float, bounds: Mapping[str, Bounds]) -> dict[str, int]:
        """Returns the numbers of workers by kind, within their bounds. One pair of roles is always needed."""
        if "any" in bounds:
            most = bounds["any"].high
            count = self._smallest(rate, Layout(0, 0, 1), most)
            if count > 2:
                # Leaning is the role planner's choice.
                count = min(count, sum(self._apart(rate, count, count)))
            return {"any": max(bounds["any"].low, min(most, count))}
        counts = {kind: bounded.low for kind, bounded in bounds.items()}
        has_both = bounds.get("both", Bounds(0, 0)).high > 0
        if bounds.keys() >= {"prefill", "decode"} and not counts.get("both"):
            least = (1, 1) if has_both else self._apart(rate, bounds["prefill"].high, bounds["decode"].high)
            for kind, count in zip(("prefill", "decode"), least, strict=True):
                counts[kind] = max(counts[kind], min(bounds[kind].high, count))
        elif has_both:
            counts["both"] = max(1, counts["both"])
        while self._multiple(rate, layout_of(counts)) < 1:
            more = [kind for kind in counts if counts[kind] < bounds[kind].high]
            if not more:
                break
            best = max(more, key=lambda kind: self._multiple(rate, layout_of({**counts, kind: counts[kind] + 1})))
            counts[best] += 1
        return counts

    def served(self, layout: Layout) -> float:
        """Returns the rate at which these workers take requests from a queue."""
        return replace(self._demand(1.0, deviations=0.0), filled=1.0).multiple(layout) if sum(layout) else 0.0

    def _apart(self, rate: float, most_prefill: int, most_decode: int) -> tuple[int, int]:
        """Returns the numbers of workers that only prefill and only decode."""
        prefill = self._smallest(rate, Layout(1, ANY_NUMBER, 0), most_prefill)
        return prefill, self._smallest(rate, Layout(ANY_NUMBER, 1, 0), most_decode)

    def _smallest(self, rate: float, one: Layout, most: int) -> int:
        """Returns the smallest multiple of layout `one` that serves the rate; `most` if none does."""
        demand = self._demand(rate)
        served = replace(demand, filled=1.0).multiple(one)
        count = max(1, math.ceil(1 / served)) if served > 0 else most
        while count < most and self._filled(demand, rate, layout := _times(count, one)).multiple(layout) < 1:
            count += 1
        return max(1, min(most, count))

    def _multiple(self, rate: float, layout: Layout) -> float:
        return self._filled(self._demand(rate), rate, layout).multiple(layout)

    def _demand(self, rate: float, deviations: float = DEVIATIONS) -> Demand:
        request = self._request
        decoding = rate * request.steps * FILLED * self._objectives.itl_s
        decoding += deviations * math.sqrt(decoding)
        return Demand.of(
            self._times,
            self._objectives,
            PromptRates(
                rate,
                rate * request.tokens,
                rate * request.attended,
                rate * request.elsewhere,
                rate * request.elsewhere_attended,
            ),
            DecodingLoad(
                decoding, decoding * request.context, request.output, request.pool_tokens, request.max_requests
            ),
        )

    def _filled(self, demand: Demand, rate: float, layout: Layout) -> Demand:
        """Returns the demand with the share of time that prompts can fill at this many workers."""
        if demand.leaning_prompts <= 0:
            return demand
        prompt_s = demand.leaning_prompts / rate
        whole_s = self._times.prefill_s + prompt_s
        beside_s = (demand.prompts + demand.requests) / (rate * demand.both) if demand.both else 0.0
        ttft_s = self._objectives.ttft_s
        return replace(
            demand,
            prefill=_fillable(layout.prefill, whole_s, ttft_s) * prompt_s / whole_s if layout.prefill else 0.0,
            filled=_fillable(layout.both, beside_s, ttft_s) if layout.both else LEAST_FILLED,
        )


def _times(count: int, layout: Layout) -> Layout:
    return Layout(*(count * number for number in layout))


def layout_of(counts: Mapping[str, int]) -> Layout:
    return Layout(counts.get("prefill", 0), counts.get("decode", 0), counts.get("both", 0) + counts.get("any", 0))


def _fillable(num_workers: int, prompt_s: float, ttft_s: float) -> float:
    """Returns the share of their time that prompts can fill, with LATE_SHARE of them late. They wait in one queue."""
    wait_s = ttft_s - prompt_s
    if prompt_s <= 0 or wait_s <= 0:
        return LEAST_FILLED
    if num_workers > MANY:
        return 1.0
    # Share of waiting prompts, by Sakasegawa's approximation, and the tail of an M/D/c queue.
    power = math.sqrt(2 * (num_workers + 1)) - 1
    tail = 2 * num_workers * wait_s / prompt_s
    low, high = LEAST_FILLED, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_late = middle**power * math.exp(-(1 - middle) * tail) > LATE_SHARE
        low, high = (low, middle) if is_late else (middle, high)
    return low
