"""Kills and stops of workers in a 1P1D cluster during page transfers."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.rpc.auth import cluster_metadata
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.conftest import Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream, QuickConfig, thaw, wait_whole
from tests.cluster.inside import open_inside

NUM_CLIENTS = 6
PROMPT_TOKENS = (240, 440)
OUTPUT_TOKENS = (16, 48)
# Includes a worker restart.
STREAM_TIMEOUT_S = 90.0
# Beyond the heartbeat timeout; beyond the lifetime of an unused link.
SHORT_STOP_S, LONG_STOP_S = 1.5, 6.5
# Stopped workers continue after these times. The one after is killed, as the supervisor would do.
STOPS_S = (SHORT_STOP_S, LONG_STOP_S, SHORT_STOP_S, LONG_STOP_S)
# For libraries' first use. Less than the slots of one end of an NCCL transport.
DEVICE_SLACK_BYTES = 128 * 2**20
NUM_CYCLES_OF_A_KIND = 5
TWO_SIDED = ("nccl", "tcp")


def config_for(base: ClusterConfig, transport: str) -> ClusterConfig:
    """Configure 1P1D with small chunks, so that a prompt takes many pushes."""
    return QuickConfig(
        model=base.model,
        device=base.device,
        workers_per_gpu=base.workers_per_gpu,
        dtype="float32",
        num_pages=256,
        chunk_size=16,
        max_batch_size=8,
        num_threads=base.num_threads,
        transport=transport,
        grpc_port=0,
        http_port=0,
    )


def random_prompt(rng: random.Random) -> list[int]:
    return random_ids(rng, rng.randint(*PROMPT_TOKENS))


class Traffic:
    """Clients that send long prompts one after another, so that pages are nearly always in flight."""

    def __init__(
        self, served: ServedCluster, seed: str, prompt: Callable[[random.Random], list[int]] = random_prompt
    ) -> None:
        """Args: prompt: makes the ids of the next prompt."""
        self.streams: list[LiveStream] = []
        self._served = served
        self._prompt = prompt
        self._stopping = threading.Event()
        self._num_finished: Counter[int] = Counter()
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._send, args=(number, random.Random(f"{seed} {number}")))
            for number in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def wait_served(self) -> None:
        """Wait for two more answers per client: the second was requested after this call."""
        before = self._num_finished.copy()
        wait_until(
            lambda: self._errors or all(self._num_finished[n] >= before[n] + 2 for n in range(NUM_CLIENTS)),
            STREAM_TIMEOUT_S,
            "every client is served again",
        )

    def stop(self) -> None:
        """Wait for running requests, then raise a client's error, if any."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(STREAM_TIMEOUT_S + 10.0)
            assert not thread.is_alive(), "a stream hangs"
        if self._errors:
            raise self._errors[0]

    def _send(self, number: int, rng: random.Random) -> None:
        while not self._stopping.is_set():
            prompt_ids = self._prompt(rng)
            try:
                stream = LiveStream(
                    self._served,
                    prompt_ids,
                    timeout_s=STREAM_TIMEOUT_S,
                    max_tokens=rng.randint(*OUTPUT_TOKENS),
                    ignore_eos=True,
                )
                self.streams.append(stream)
                stream.finish()
            except Exception as error:
                self._errors.append(error)
                return
            self._num_finished[number] += 1


@dataclass
class Cycle:
    """Result of one kill. Times are seconds since then.

    Attributes:
        num_leased: pages in open leases just before.
        resumed_s: end of the streams' longest pause.
        ready_s: time until all workers and links were back.
        whole_s: duration of the cycle.
    """

    name: str
    num_leased: int
    num_streams: int
    num_restarted: int
    resumed_s: float
    ready_s: float
    whole_s: float

    def __str__(self) -> str:
        return (
            f"{self.name:<30} {self.num_leased:>3} pages leased; {self.num_restarted:>2} of {self.num_streams:>3} "
            f"streams restarted; going on after {self.resumed_s:5.2f} s, workers ready after {self.ready_s:5.2f} s, "
            f"all in {self.whole_s:5.2f} s"
        )


class KillDrill:
    def __init__(self, served: ServedCluster, oracle: Oracle) -> None:
        self._served = served
        self._oracle = oracle
        # Device by worker; first device memory by pid.
        self._devices: dict[str, str] = {}
        self._device_bytes: dict[int, int] = {}

    def run_all(self, role: str) -> Iterator[Cycle]:
        """Kill and stop the worker in turn, ten times in all."""
        for number in range(NUM_CYCLES_OF_A_KIND):
            for signum in (signal.SIGKILL, signal.SIGSTOP):
                yield self.run(signum, role, number)

    def run_kills(self, role: str, num_kills: int) -> Iterator[Cycle]:
        for number in range(num_kills):
            yield self.run(signal.SIGKILL, role, number)

    def run(self, signum: signal.Signals, role: str, number: int) -> Cycle:
        """Signal the only worker of a role during transfers, then check all invariants."""
        served, victim = self._served, f"{role}-0"
        started = time.monotonic()
        wait_whole(served)
        self._look_at_devices()
        traffic = Traffic(served, f"{signum.name} {role} {number}")
        try:
            with self._open_leases() as num_leased:
                under_way = [stream for stream in traffic.streams if not stream.ended]
                old_pid = served.kill(victim, signum)
                struck = time.monotonic()
            is_replaced = signum is signal.SIGKILL
            if signum is signal.SIGSTOP:
                is_replaced = number >= len(STOPS_S)
                self._end_stop(old_pid, SHORT_STOP_S if is_replaced else STOPS_S[number], is_replaced=is_replaced)
            if is_replaced:
                wait_until(lambda: self._pid(victim) not in (0, old_pid), STREAM_TIMEOUT_S, "it is replaced")
            wait_whole(served, STREAM_TIMEOUT_S)
            ready_s = time.monotonic() - struck
            traffic.wait_served()
        finally:
            traffic.stop()
        assert (self._pid(victim) != old_pid) == is_replaced
        for stream in traffic.streams:
            self._check(stream)
        served.wait_clean()
        self._look_at_devices()
        self._check_threads()
        restarted = [s for s in traffic.streams if s.answer.last.handover.attempts > 1]
        assert restarted, "nobody was in the middle of anything"
        return Cycle(
            f"{signum.name} {role} {number}" + (", ended" if signum is signal.SIGSTOP and is_replaced else ""),
            num_leased,
            len(traffic.streams),
            len(restarted),
            max(stream.resumed_at(struck) for stream in under_way) - struck,
            ready_s,
            time.monotonic() - started,
        )

    @contextmanager
    def _open_leases(self) -> Iterator[int]:
        """Wait until the decode worker has open leases; yield their number of pages.

        Prefill ships chunk by chunk, so pages are in flight then and in the next milliseconds.
        """
        worker = self._served.worker("decode-0")
        assert worker is not None
        metadata = cluster_metadata(self._served.cluster.cluster_token)
        with open_inside(self._served.cluster, worker.address) as channel:
            admin = worker_pb2_grpc.WorkerAdminStub(channel)

            def num_leased() -> int:
                report = admin.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), timeout=5.0, metadata=metadata)
                assert not report.violation
                return report.stats.num_leased_pages

            # Lets other prompts reach decode.
            time.sleep(0.3)
            yield wait_until(num_leased, 20.0, "pages are on their way")

    def _end_stop(self, pid: int, seconds: float, *, is_replaced: bool) -> None:
        time.sleep(seconds)
        if is_replaced:
            os.kill(pid, signal.SIGKILL)
        else:
            thaw([pid])

    def _pid(self, worker_id: str) -> int:
        worker = self._served.worker(worker_id)
        return worker.pid if worker is not None else 0

    def _check(self, stream: LiveStream) -> None:
        answer = stream.finish()
        assert len(answer.token_ids) == stream.sampling["max_tokens"]
        assert self._oracle.confirms(stream.prompt_ids, answer.token_ids)

    def _look_at_devices(self) -> None:
        """Assert that replacements keep their device, and that memory of dead epochs is freed."""

        def look(actor: object) -> tuple[int, str, int]:
            # Runs in the worker's process, which cannot import test modules.
            import os

            import torch

            num_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), num_bytes

        for worker_id in ("prefill-0", "decode-0"):

            def is_as_before(worker_id: str = worker_id, first_bytes: dict[int, int] = self._device_bytes) -> bool:
                pid, devices, num_bytes = ray.get(self._served.cluster.actor(worker_id).__ray_call__.remote(look))
                assert self._devices.setdefault(worker_id, devices) == devices
                return num_bytes <= first_bytes.setdefault(pid, num_bytes) + DEVICE_SLACK_BYTES

            wait_until(is_as_before, 10.0, f"{worker_id} holds no more device memory than before")

    def _check_threads(self) -> None:
        """Wait until only the current links' page-moving threads are left (two-sided transports)."""
        expected = ["move-pages"] if self._served.cluster._config.transport in TWO_SIDED else []

        def names(actor: object) -> list[str]:
            import threading

            return [thread.name for thread in threading.enumerate()]

        for worker_id in ("prefill-0", "decode-0"):

            def is_alone(worker_id: str = worker_id) -> bool:
                running = ray.get(self._served.cluster.actor(worker_id).__ray_call__.remote(names))
                return [n for n in running if n.endswith(("move-pages", "-transport"))] == expected

            wait_until(is_alone, 40.0, f"no thread of a dead epoch is left in {worker_id}")
