"""A cluster in queueing theory: arrivals, a queue of prompts, batches, workers that start and leave."""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.both_worker.step_budget import FILLED
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.supervise.size_planner import SizePlanner, SizeReport
from tandem.messages import ForwardTimes
from tandem.router.workers.leans import RouterDemand
from tandem.router.workers.objectives import Objectives
from tests.fakes.clock import FakeClock

# About an H200 with a model of 8 billion parameters, with mixed steps.
TIMES = ForwardTimes(0.0, 22e-6, 7e-10, 4e-3, 16e-6, 32e-9)
AIMS = Objectives(0.5, 0.025)


@dataclass(eq=False, slots=True)
class _Request:
    arrived_at: float
    left_s: float
    left_tokens: float


class SizedCluster:
    """Serves Poisson arrivals, and acts on a planner's targets.

    Workers share one queue of prompts, one batch and their time evenly. Leaving workers end at once.

    Attributes:
        now: seconds since the start.
        sizes: targets by tick, one kind.
        changes: times of changed targets.
        good, late: requests whose first token came within the objective, or after it.
        worker_s: seconds of all workers that were ordered and have not left.
        is_heard: whether the router's reports arrive.
        said_times, is_measured: reported forward times, and whether they are of warm workers.
    """

    def __init__(
        self,
        bounds: Bounds,
        start_s: float = 30.0,
        seed: int = 1,
        times: ForwardTimes = TIMES,
        prompt: int = 4096,
        output: int = 256,
        ready: int | None = None,
        slowness: float = 1.0,
        tick_s: float = 0.5,
    ) -> None:
        """Args: slowness: multiple of the reported times that prompts take; tick_s: seconds between plans."""
        self.clock = FakeClock()
        self.planner = SizePlanner({"any": bounds}, AIMS, self.clock)
        self.times, self.said_times, self._prompt, self._output = times, times, prompt, output
        self._start_s, self._slowness, self._tick_s = start_s, slowness, tick_s
        self._prompt_s = prompt * times.prompt_token_s + prompt**2 / 2 * times.attended_token_s
        self._random = random.Random(seed)
        self.ready = bounds.low if ready is None else ready
        self._starting: list[float] = []
        self._queue: deque[_Request] = deque()
        self._batch: list[_Request] = []
        self._arrivals = self._prompts = self._finished = 0
        self.now = 0.0
        self.sizes: list[int] = []
        self.changes: list[float] = []
        self.good = self.late = 0
        self.worker_s = 0.0
        self.is_heard = True
        self.is_measured = True

    @property
    def target(self) -> int:
        return self.planner.targets["any"]

    def run(self, seconds: float, rate: Callable[[float], float] | float) -> None:
        """Args: rate: arrivals per second, or a function of the seconds in this run."""
        began = self.now
        while self.now < began + seconds:
            per_s = rate(self.now - began) if callable(rate) else rate
            self._arrive(_poisson(self._random, per_s * self._tick_s))
            self._serve()
            self.clock.advance(self._tick_s)
            self.now += self._tick_s
            self._plan()

    def kill(self, count: int) -> None:
        """Ends workers, which are started again."""
        self.ready -= count
        self._starting += [self.now + self._start_s] * count

    def _arrive(self, count: int) -> None:
        prompt_s = self._slowness * self._prompt_s
        for _ in range(count):
            output = max(1.0, self._random.expovariate(1 / self._output))
            self._queue.append(_Request(self.now, prompt_s, output))
        self._arrivals += count

    def _serve(self) -> None:
        joined = [at for at in self._starting if at <= self.now]
        self._starting = [at for at in self._starting if at > self.now]
        self.ready += len(joined)
        if not self.ready:
            return
        limit_s = FILLED * AIMS.itl_s
        request_s = self.times.request_s + self.times.kv_token_s * (self._prompt + self._output)
        plain_s = self.times.step_s + len(self._batch) / self.ready * request_s
        for_prompts_s = self.ready * self._tick_s * max(0.05, 1 - (plain_s + self.times.prefill_s) / limit_s)
        is_mixed = bool(self._queue)
        while self._queue and for_prompts_s > 0:
            head = self._queue[0]
            took_s = min(head.left_s, for_prompts_s)
            head.left_s -= took_s
            for_prompts_s -= took_s
            if head.left_s <= 0:
                self._batch.append(self._queue.popleft())
                self._prompts += 1
                is_good = self.now + self._tick_s / 2 - head.arrived_at <= AIMS.ttft_s
                self.good += is_good
                self.late += not is_good
        num_tokens = self._tick_s / (max(limit_s, plain_s) if is_mixed else plain_s)
        for request in self._batch:
            request.left_tokens -= num_tokens
        before = len(self._batch)
        self._batch = [request for request in self._batch if request.left_tokens > 0]
        self._finished += before - len(self._batch)

    def _plan(self) -> None:
        self.worker_s += self._tick_s * (self.ready + len(self._starting))
        target = self.planner.plan(
            SizeReport(self._demands(), {"any": self.ready}, {"any": len(self._starting)}, {}, {"any": self._start_s})
        )["any"]
        if self.sizes and target != self.sizes[-1]:
            self.changes.append(self.now)
        self.sizes.append(target)
        more = target - self.ready - len(self._starting)
        if more > 0:
            self._starting += [self.now + self._start_s] * more
        elif more < 0:
            self.ready = max(0, self.ready + more)

    def _demands(self) -> dict[str, RouterDemand]:
        if not self.is_heard:
            return {}
        attended = self._prompts * self._prompt**2 // 2
        tokens = self._prompts * self._prompt
        has_workers = self.ready > 0
        return {
            "r": RouterDemand(
                self._prompts,
                tokens,
                attended,
                tokens,
                attended,
                {"w": len(self._batch)} if has_workers else {},
                len(self._batch) * self._prompt,
                self.said_times if has_workers else ForwardTimes(),
                float(self._output),
                800_000,
                256,
                whole_tokens=tokens,
                arrivals=self._arrivals,
                num_waiting=len(self._queue),
                waiting_tokens=len(self._queue) * self._prompt,
                oldest_wait_s=self.now - self._queue[0].arrived_at if self._queue else 0.0,
                num_unplaced=0 if has_workers else len(self._queue),
                finished=self._finished,
                finished_tokens=self._finished * self._output,
                finished_steps=self._finished * self._output,
                is_measured=has_workers and self.is_measured,
            )
        }


def _poisson(source: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(source.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), source.random(), 0
    while product > limit:
        product *= source.random()
        count += 1
    return count
