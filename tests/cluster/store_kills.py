"""Kills of the page store and of its workers while copies are queued in both directions."""

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import grpc
import ray

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import RESTART_S, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.conversations import wait_store
from tests.cluster.faults import LiveStream, wait_whole
from tests.cluster.kills import Traffic, config_for
from tests.cluster.test_page_store import STORE, pid_of, regions_of, store_metrics

# Their pages take twice the pool.
NUM_DOCUMENTS = 24
DOCUMENT_TOKENS = (240, 400)
QUESTION_TOKENS = (8, 40)
LOADED_S = 60.0
# Copies queued in the meantime do not begin.
HOLD_S = 3.0
QUEUED_S = 1.0
# From the workers' sessions to the next written page, and from the last request to the last free slot.
GRANT_S, REST_S = 5.0, 10.0


def with_store(base: ClusterConfig, worker_id: str) -> ClusterConfig:
    """Configure 1P1D for prefill-0, one worker of role both for both-0."""
    config = replace(config_for(base, "auto"), store_memory="64MiB")
    return config if worker_id == "prefill-0" else replace(config, num_prefill=0, num_decode=0, num_both=1)


class Queued(NamedTuple):
    """Pages of queued copies. Attributes: held_at: monotonic time since which no copy begins."""

    num_out: int
    num_in: int
    held_at: float


@dataclass
class StoreKill:
    """Result of a kill. Times are seconds since then.

    Attributes:
        granted_s: until a worker has written a page again.
        whole_s: duration, with the checks.
    """

    victims: Sequence[str]
    queued: Queued
    num_streams: int
    num_loaded_tokens: int
    granted_s: float
    whole_s: float

    def __str__(self) -> str:
        return (
            f"{' and '.join(self.victims):<22} {self.queued.num_out:>3} pages queued out, {self.queued.num_in:>3} in; "
            f"{self.num_streams:>3} streams, {self.num_loaded_tokens:>6} tokens loaded; written again after "
            f"{self.granted_s:5.2f} s, all in {self.whole_s:5.2f} s"
        )


class StoreKillDrill:
    def __init__(self, served: ServedCluster, oracle: Oracle, worker_id: str) -> None:
        """Args: worker_id: of the worker whose copies are held back, and which may be killed."""
        self._served = served
        self._oracle = oracle
        self._worker_id = worker_id
        rng = random.Random(0)
        self._documents = [random_ids(rng, rng.randint(*DOCUMENT_TOKENS)) for _ in range(NUM_DOCUMENTS)]
        self._num_slots = 0.0

    def run_all(self, kills: Sequence[Sequence[str]]) -> Iterator[StoreKill]:
        """Args: kills: victims of each, killed together."""
        for number, victims in enumerate(kills):
            yield self.run(victims, number)

    def run(self, victims: Sequence[str], number: int) -> StoreKill:
        """Kill processes under queued copies, then check all invariants."""
        served, started = self._served, time.monotonic()
        wait_store(served)
        worker = served.worker(self._worker_id)
        assert worker is not None
        pids = {STORE: pid_of(served, STORE), self._worker_id: worker.pid}
        traffic = Traffic(served, f"{victims} {number}", self._prompt)
        try:
            wait_until(lambda: num_loaded(traffic), LOADED_S, "prompts are loaded from the store")
            queued = wait_until(self._queue, RESTART_S, "copies are queued in both directions")
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            struck = time.monotonic()
            for victim in victims:
                wait_until(lambda name=victim: self._pid(name) not in (0, pids[name]), RESTART_S, f"{victim} is back")
            wait_whole(served)
            self._wait_written()
            granted = time.monotonic()
            if self._worker_id not in victims:
                assert granted >= queued.held_at + HOLD_S, "the store granted slots under copies of its former life"
            traffic.wait_served()
        finally:
            traffic.stop()
        for stream in traffic.streams:
            self._check(stream)
        served.wait_clean()
        self._check_slots()
        self._check_region()
        whole_s = time.monotonic() - started
        return StoreKill(victims, queued, len(traffic.streams), num_loaded(traffic), granted - struck, whole_s)

    def _prompt(self, rng: random.Random) -> list[int]:
        return [*rng.choice(self._documents), *random_ids(rng, rng.randint(*QUESTION_TOKENS))]

    def _pid(self, name: str) -> int:
        """Return 0 while the process does not run."""
        if name == STORE:
            with suppress(ray.exceptions.RayError):
                return pid_of(self._served, name)
            return 0
        worker = self._served.worker(name)
        return worker.pid if worker is not None and worker.alive else 0

    def _queue(self) -> Queued | None:
        """Hold the worker's copies back until some are queued in both directions, and for a while longer."""

        def hold(actor: object) -> tuple[int, int, float]:
            # Runs in the worker's process, which cannot import test modules.
            import time
            from typing import Any

            import torch

            store: Any = actor._process._store  # type: ignore[attr-defined]

            def held_back(copy: Any, stream: Any) -> Any:
                def copy_or_wait(sources: Any, destinations: Any) -> Any:
                    if sources:
                        return copy(sources, destinations)
                    if stream is None:
                        time.sleep(hold_s)
                    else:
                        with torch.cuda.stream(stream):
                            # No clock is faster than 2 GHz.
                            torch.cuda._sleep(int(2e9 * hold_s))
                    return None

                return copy_or_wait

            held_at = time.monotonic()
            # Of the only rank.
            copies = store._copies._copies
            for way in (copies._out, copies._in):
                stream = getattr(way, "_stream", None)
                thread = way if stream is None else way._thread
                if thread._copy.__name__ != "copy_or_wait":
                    thread._copy = held_back(thread._copy, stream)
                thread.start((), ())
            # Copies submitted before have ended then.
            time.sleep(0.1)
            writer, loader = store._tier._writer, store._tier._loader
            while time.monotonic() < held_at + queued_s:
                num_out, num_in = writer.num_held_pages, loader.num_held_pages
                if num_out and num_in:
                    return num_out, num_in, held_at
                time.sleep(0.001)
            return 0, 0, held_at

        hold_s, queued_s = HOLD_S, QUEUED_S
        queued = Queued(*ray.get(self._served.cluster.actor(self._worker_id).__ray_call__.remote(hold)))
        return queued if queued.num_out else None

    def _wait_written(self) -> None:
        """Wait until all workers have a session, and one of them writes a page."""
        wait_until(lambda: self._written() is not None, RESTART_S, "every worker has a session")
        before = self._written() or 0.0
        wait_until(lambda: (self._written() or 0.0) > before, HOLD_S + GRANT_S, "the store grants slots again")

    def _written(self) -> float | None:
        """Return the number of written pages; None unless every worker has a session."""
        with suppress(grpc.RpcError, ray.exceptions.RayError):
            metrics = store_metrics(self._served)
            if metrics.get("sessions") == len(self._served.client.server_info().workers):
                return metrics["written_pages_total"]
        return None

    def _check(self, stream: LiveStream) -> None:
        answer = stream.finish()
        assert len(answer.token_ids) == stream.sampling["max_tokens"]
        assert self._oracle.confirms(stream.prompt_ids, answer.token_ids)

    def _check_slots(self) -> None:
        """Wait until every slot is free or has a page that nobody uses."""

        def num_at_rest() -> float:
            metrics = store_metrics(self._served)
            busy = metrics["slots.writing"] + metrics["slots.reading"] + metrics["pinned_slots"]
            return 0.0 if busy else metrics["slots.free"] + metrics["slots.ready"]

        num_slots = wait_until(num_at_rest, REST_S, "no slot is in use")
        self._num_slots = self._num_slots or num_slots
        assert num_slots == self._num_slots

    def _check_region(self) -> None:
        """Assert that every worker maps the launcher's region, and has all of it registered with its GPU."""

        def is_registered(actor: object) -> bool:
            # Runs in the worker's process.
            copies = actor._process._store._copies  # type: ignore[attr-defined]
            if not hasattr(copies, "_memory"):
                return True
            from cuda.bindings import runtime

            first = copies._region.ctypes.data
            found = [runtime.cudaPointerGetAttributes(at)[1] for at in (first, first + copies._region.nbytes - 1)]
            return all(one.type == runtime.cudaMemoryType.cudaMemoryTypeHost for one in found)

        own = regions_of(os.getpid())
        for worker in self._served.client.server_info().workers:
            assert regions_of(worker.pid) == own and len(own) == 1
            assert ray.get(self._served.cluster.actor(worker.worker_id).__ray_call__.remote(is_registered))


def num_loaded(traffic: Traffic) -> int:
    """Return the prompt tokens that came from the store's memory."""
    return sum(stream.answer.last.usage.host_tokens for stream in list(traffic.streams))


def kills_of(worker_id: str) -> Sequence[Sequence[str]]:
    """Return five kills of the store and three of the worker, two of these at once."""
    return ((STORE,), (worker_id,), (STORE,), (worker_id, STORE), (STORE,), (STORE, worker_id))
