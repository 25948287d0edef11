"""The live page of a busy cluster without processes: a router's own snapshot of scripted workers."""

import json
import math
import random
import time
from dataclasses import replace
from typing import Any

from tandem.lifecycle import CRITICAL_PATH, ENDED, PhaseTiming
from tandem.messages import Heartbeat, LinkState, Shipped, WorkerStats
from tandem.router.observe.live.snapshot import SnapshotBuilder
from tandem.router.requests.tracker import RequestReport
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import RouterHarness
from tests.fakes.scripted_worker import ScriptedWorker

NUM_SECONDS = 300
NUM_PAGES = 1024
PLANNED = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
LOST = "decode-0"
ADDRESS = "10.120.130.140:40000"
MODEL = "smollm2-135m-instruct"


class Scene:
    """Five minutes of load; `LOST` dies half a minute before their end."""

    def __init__(self) -> None:
        """Needs a running event loop."""
        self._h = RouterHarness(0, 0, workers=PLANNED)
        self._h.clock.now = time.time() - NUM_SECONDS
        self._h.router.live.journal._now = self._h.clock
        self._rng = random.Random(1)
        self._num_bytes = self._num_tokens = 0
        self._workers = {
            name: ScriptedWorker(self._h.router, name, role, num_pages=NUM_PAGES, address=ADDRESS)
            for name, role in PLANNED.items()
        }
        for name, worker in self._workers.items():
            if name.startswith("prefill"):
                worker.link_to("decode-0", "decode-1")
        self.frames = SnapshotBuilder(self._h.router, self._h.config, self._h.clock)
        for second in range(NUM_SECONDS):
            if second == NUM_SECONDS - 30:
                self._lose()
            self._pass_second(second)

    def whole(self) -> dict[str, Any]:
        frame = json.loads(self.frames.everything().seen_by(""))
        frame["router"]["model"] = MODEL
        return frame

    def rejoin(self) -> None:
        """Brings the lost worker back."""
        self._workers[LOST] = ScriptedWorker(self._h.router, LOST, "decode", life="second", num_restarts=1)
        for name in ("prefill-0", "prefill-1"):
            self._workers[name].link_to_life(LOST, f"{LOST}-second")

    def _lose(self) -> None:
        router = self._h.router
        for name in ("prefill-0", "prefill-1"):
            self._workers[name].say(LinkState(LOST, f"{LOST}-life", up=False, reason="Connection reset by peer"))
        router.lose_worker(self._workers.pop(LOST).worker, "disconnected", "the stream broke: Socket closed")
        for _ in range(7):
            router.live.journal.attempt_restarted("worker_lost")

    def _pass_second(self, second: int) -> None:
        load = 1.2 + math.sin(second / 25)
        self._num_tokens += int(900 * load)
        for name, worker in self._workers.items():
            self._num_bytes += int(4e6 * load)
            self._beat(worker, second, load, is_prefill=name.startswith("prefill"))
        for _ in range(6):
            self._h.router.live.ttft.observe(self._rng.uniform(0.02, 0.3))
            self._h.router.metrics.itl.observe(self._rng.uniform(0.008, 0.03))
        if second % 4 == 0:
            self._end_request(second)
        self.frames.sample()
        self._h.clock.advance(1.0)

    def _beat(self, worker: ScriptedWorker, second: int, load: float, *, is_prefill: bool) -> None:
        locked = int(150 * load)
        stats = WorkerStats(3, 17, NUM_PAGES, NUM_PAGES - 450 - locked, 412, locked, 38)
        num_tokens = self._num_tokens
        if is_prefill:
            receivers = [name for name in self._workers if name.startswith("decode")]
            shipped = tuple(Shipped("shared_memory", 1, self._num_bytes, name) for name in receivers)
            stats = replace(stats, prompt_tokens_computed=num_tokens, shipped=shipped)
            stats = replace(stats, prefix_cached_tokens=2 * num_tokens, prefix_host_tokens=num_tokens)
        else:
            # Idle with a full cache.
            stats = replace(stats, output_tokens_computed=num_tokens, num_locked_pages=0)
            stats = replace(stats, num_leased_pages=0, num_free_pages=NUM_PAGES - 412)
        worker.say(Heartbeat(second, stats))

    def _end_request(self, second: int) -> None:
        client_id = f"session-of-a-long-name-{second:04}" if second % 3 else ""
        spec = request_spec((1,) * self._rng.randrange(20, 9000), client_request_id=client_id)
        tracker = self._h.router.make_tracker(spec)
        tracker.moments[ENDED] = int(self._h.clock() * 1e9)
        tracker.prefill_worker_id, tracker.decode_worker_id = "prefill-0", "decode-1"
        timings = [PhaseTiming(phase.name, 0.0, self._rng.uniform(1, 400), True) for phase in CRITICAL_PATH]
        total = sum(timing.duration_ms for timing in timings)
        timings += [PhaseTiming("ttft", 0.0, total / 3), PhaseTiming("e2e", 0.0, total)]
        outcome = self._rng.choice(("stop", "length", "length", "abort", "unavailable"))
        if outcome == "unavailable":
            tracker.failure = "no decode worker took it within 30 s"
        self._h.router.live.ended.add(RequestReport(tracker, outcome, 123, 123, timings))
