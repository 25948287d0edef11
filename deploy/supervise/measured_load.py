"""A cluster's load, measured from its routers' reports."""

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

from tandem.deploy.supervise.arrival_history import ArrivalHistory, Rate
from tandem.deploy.supervise.worker_needs import MeanRequest
from tandem.messages import ForwardTimes
from tandem.router.workers.leans import RouterDemand

# Number of recent requests in a mean, and of assumed requests before the first has ended.
MEMORY, ASSUMED = 500.0, 8.0
# Output tokens before any worker has joined.
ASSUMED_OUTPUT = 128.0
# Time constant of CPU use, in seconds.
CPU_S = 30.0
# Seconds in which an equal report is the same one again.
REPEATED_S = 2.0


class _Counters(NamedTuple):
    """Counters of RouterDemand, the work of prompts last."""

    arrivals: int
    cpu_s: float
    finished: int
    finished_tokens: int
    finished_steps: int
    prompts: int
    prompt_tokens: int
    attended_tokens: int
    elsewhere_tokens: int
    elsewhere_attended: int
    whole_tokens: int


_counters = attrgetter(*_Counters._fields)


class _Means:
    """Means per request over about MEMORY requests."""

    def __init__(self, size: int) -> None:
        self._count = 0.0
        self._sums = [0.0] * size

    def add(self, count: float, sums: tuple[float, ...]) -> None:
        kept = math.exp(-count / MEMORY)
        self._count = kept * self._count + count
        self._sums = [kept * old + new for old, new in zip(self._sums, sums, strict=True)]

    @property
    def values(self) -> list[float]:
        return [total / self._count if self._count else 0.0 for total in self._sums]

    @property
    def is_known(self) -> bool:
        return self._count > 0


class MeasuredLoad:
    """Accumulates reports. A router that restarts counts from 0; the first report of all is the start.

    Attributes:
        arrivals: requests since the first report.
        num_waiting, oldest_wait_s: as in RouterDemand, of all routers.
        cpu: cores in use by the routers' event loops.
        times: forward times of warm workers; before there are any, of others, and before these, those assumed.
        busy_at: time of the last request in hand; -inf: none.
    """

    def __init__(self, now: float, assumed: ForwardTimes) -> None:
        self.arrivals = 0
        self.num_waiting = 0
        self.oldest_wait_s = 0.0
        self.cpu = 0.0
        self.times = self._assumed = assumed
        self._waiting_tokens = 0
        self.busy_at = -math.inf
        self._history = ArrivalHistory(now)
        self._heard: dict[str, tuple[float, RouterDemand]] = {}
        self._cpu_of: dict[str, float] = {}
        # Prompts' work; outputs' tokens and steps.
        self._prompts, self._outputs = _Means(5), _Means(2)
        self._learned_at = now
        self._pool_tokens = self._max_decoding = math.inf

    @property
    def rate(self) -> Rate:
        return self._history.rate()

    @property
    def request(self) -> MeanRequest:
        tokens, attended, elsewhere, elsewhere_attended, whole = self._prompts.values
        if not self._prompts.is_known and self.num_waiting:
            # Before any worker: as if nothing were cached.
            tokens = elsewhere = whole = self._waiting_tokens / self.num_waiting
            attended = elsewhere_attended = tokens * tokens / 2
        output, steps = self._outputs.values if self._outputs.is_known else (ASSUMED_OUTPUT, ASSUMED_OUTPUT)
        return MeanRequest(
            tokens,
            attended,
            elsewhere,
            elsewhere_attended,
            whole,
            output,
            steps,
            self._pool_tokens,
            self._max_decoding,
        )

    def learn(self, demands: Mapping[str, RouterDemand], now: float) -> None:
        elapsed_s, self._learned_at = now - self._learned_at, now
        self._history.pass_time(now)
        cpu, is_first = 0.0, not self._heard
        for name, router in demands.items():
            cpu += self._hear(name, router, now, is_first=is_first)
        self.num_waiting = sum(router.num_waiting for router in demands.values())
        self._waiting_tokens = sum(router.waiting_tokens for router in demands.values())
        self.oldest_wait_s = max((router.oldest_wait_s for router in demands.values()), default=0.0)
        num_decoding = sum(sum(router.num_decoding.values()) for router in demands.values())
        if self.num_waiting or num_decoding or any(router.num_unplaced for router in demands.values()):
            self.busy_at = now
        if demands and elapsed_s > 0:
            self.cpu += (1.0 - math.exp(-elapsed_s / CPU_S)) * (cpu - self.cpu)
        self._take_times(list(demands.values()))

    def _hear(self, name: str, router: RouterDemand, now: float, *, is_first: bool) -> float:
        """Returns the cores that this router used since its last report."""
        at, before = self._heard.get(name, (now, router))
        if name not in self._heard and not is_first:
            at, before = now - REPEATED_S, RouterDemand()
        elif router == before and 0 < now - at < REPEATED_S:
            # Its answer is still due.
            return self._cpu_of.get(name, 0.0)
        if any(new < old for new, old in zip(_counters(router), _counters(before), strict=True)):
            # It has restarted.
            before = RouterDemand()
        self._heard[name] = now, router
        news = _Counters(*(new - old for new, old in zip(_counters(router), _counters(before), strict=True)))
        self.arrivals += news.arrivals
        if news.arrivals:
            self.busy_at = now
        self._history.add(news.arrivals, now - at, now)
        if news.prompts:
            self._prompts.add(news.prompts, news[-5:])
        if not self._outputs.is_known and router.output_tokens:
            self._outputs.add(ASSUMED, (ASSUMED * router.output_tokens,) * 2)
        if news.finished:
            self._outputs.add(news.finished, (news.finished_tokens, news.finished_steps))
        self._cpu_of[name] = news.cpu_s / (now - at) if now > at else 0.0
        return self._cpu_of[name]

    def _take_times(self, demands: list[RouterDemand]) -> None:
        measured = [router for router in demands if router.is_measured]
        if not measured and self.times == self._assumed:
            measured = [router for router in demands if router.times.step_s > 0]
        if not measured:
            return
        self.times = measured[0].times
        self._pool_tokens = min((router.pool_tokens for router in measured if router.pool_tokens), default=math.inf)
        self._max_decoding = min((router.max_decoding for router in measured if router.max_decoding), default=math.inf)
