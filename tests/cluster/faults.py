"""Faults for a running cluster, and clients that watch their streams."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from tandem.client import TandemClient
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.router.config import RouterConfig
from tests.cluster.conftest import RESTART_S, Answer, ServedCluster, wait_until

STREAM_TIMEOUT_S = 60.0


class QuickConfig(ClusterConfig):
    """Shorter silence timeouts, for short tests."""

    def router(self, *args: Any) -> RouterConfig:
        return replace(ClusterConfig.router(self, *args), heartbeat_timeout_s=1.0)


class LiveStream:
    """One client's stream, read by its own thread."""

    def __init__(
        self,
        served: ServedCluster,
        prompt_ids: Sequence[int],
        *,
        client: TandemClient | None = None,
        timeout_s: float = STREAM_TIMEOUT_S,
        **sampling: Any,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.sampling = sampling
        self.answer = Answer()
        self.error: Exception | None = None
        self.sent = time.monotonic()
        self.ended = 0.0
        self._times: list[float] = []
        self._timeout_s = timeout_s
        client = client or served.client
        self._responses = client.generate(served.request(prompt_ids, **sampling), timeout_s=timeout_s)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_tokens(self, num_tokens: int, timeout_s: float = STREAM_TIMEOUT_S) -> bool:
        """Return whether the tokens or the end came in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self.ended or len(self.answer.token_ids) >= num_tokens), timeout_s
            )

    def finish(self) -> Answer:
        self._thread.join(self._timeout_s + 5.0)
        assert not self._thread.is_alive(), "the stream hangs"
        if self.error is not None:
            raise self.error
        return self.answer

    def longest_gap(self) -> float:
        """Return the longest wait for a token, TTFT included."""
        times = [self.sent, *self._times]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def longest_gap_after_first(self) -> float:
        """Return the longest time between two messages with tokens."""
        return max((b - a for a, b in itertools.pairwise(self._times)), default=0.0)

    def resumed_at(self, moment: float) -> float:
        """Return the end of the longest wait that ended after `moment`; without one, `moment`."""
        with self._changed:
            waits = itertools.pairwise((self.sent, *self._times, self.ended))
            return max(((end - start, end) for start, end in waits if end > moment), default=(0.0, moment))[1]

    def _read(self) -> None:
        try:
            for response in self._responses:
                with self._changed:
                    self.answer.add(response)
                    if response.token_ids:
                        self._times.append(time.monotonic())
                    self._changed.notify_all()
        except Exception as error:
            self.error = error
        with self._changed:
            self.ended = time.monotonic()
            self._changed.notify_all()


def cut_control(served: ServedCluster, worker_id: str) -> None:
    # A stream closed by the router may linger beside the current one.
    assert _reset_connections(served, worker_id, served.cluster.routers["router-0"].cluster) > 0


def cut_links(served: ServedCluster, worker_id: str) -> None:
    addresses = {w.worker_id: w.address for w in served.client.server_info().workers if w.role == "decode"}
    own = addresses.get(worker_id)
    assert _reset_connections(served, worker_id, *([own] if own else addresses.values())) > 0


def _reset_connections(served: ServedCluster, worker_id: str, *addresses: str) -> int:
    """Reset the worker's TCP connections with these ports at either end, and return their number.

    Data in flight is lost, as with a network fault.
    """
    ports = [int(address.rpartition(":")[2]) for address in addresses]

    def reset(actor: object) -> int:
        # Runs in the worker's process, which cannot import test modules.
        import ctypes
        import socket
        from contextlib import suppress
        from pathlib import Path

        libc = ctypes.CDLL(None)
        num_reset = 0
        for name in Path("/proc/self/fd").iterdir():
            fd = int(name.name)
            with suppress(OSError):
                # This view does not own the descriptor.
                view = socket.socket(fileno=fd)
                try:
                    is_tcp = view.family in (socket.AF_INET, socket.AF_INET6) and view.type == socket.SOCK_STREAM
                    if is_tcp and {view.getpeername()[1], view.getsockname()[1]} & set(ports):
                        # connect() with AF_UNSPEC resets the connection.
                        num_reset += libc.connect(fd, bytes(16), 16) == 0
                finally:
                    view.detach()
        return num_reset

    return ray.get(served.cluster.actor(worker_id).__ray_call__.remote(reset))


def thaw(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(served: ServedCluster, worker_ids: Sequence[str]) -> Iterator[None]:
    pids = [served.kill(worker_id, signal.SIGSTOP) for worker_id in worker_ids]
    try:
        yield
    finally:
        thaw(pids)


def wait_whole(served: ServedCluster, within_s: float = RESTART_S) -> None:
    """Wait until all workers are connected and fully linked."""
    config = served.cluster._config

    def is_whole() -> bool:
        workers = served.client.server_info().workers
        prefill = [w for w in workers if w.role == "prefill"]
        num_links = sum(len(w.linked_to) for w in prefill)
        return len(workers) == config.num_workers and num_links == config.num_prefill * config.num_decode

    wait_until(is_whole, within_s, "every worker and every link is there")


class Footprints:
    """Samples memory and open files of the cluster's processes."""

    MAX_GROWTH_BYTES = 8 * 2**20
    MAX_GROWTH_FILES = 8
    MIN_SAMPLES = 8

    def __init__(self, served: ServedCluster) -> None:
        self._served = served
        self._router_pid = ray.get(served.cluster.actor("router-0").__ray_call__.remote(lambda actor: os.getpid()))
        self._samples: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def processes(self) -> set[tuple[str, int]]:
        """Return names and pids."""
        workers = {(worker.worker_id, worker.pid) for worker in self._served.client.server_info().workers}
        return {*workers, ("router", self._router_pid)}

    def measure(self) -> None:
        for name, pid in self.processes():
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self._samples.setdefault((name, pid), []).append((resident, num_files))

    def growth(self) -> tuple[int, int]:
        """Return the largest growth of a process since warm-up: (bytes, files)."""
        bytes_grown = files_grown = 0
        for samples in self._samples.values():
            if len(samples) >= self.MIN_SAMPLES:
                warm, last = samples[len(samples) // 3], samples[-1]
                bytes_grown = max(bytes_grown, last[0] - warm[0])
                files_grown = max(files_grown, last[1] - warm[1])
        return bytes_grown, files_grown

    def __str__(self) -> str:
        """Resident memory of each process at each sample, in MiB."""
        return "\n".join(
            f"{name} ({pid}): {' '.join(f'{resident / 2**20:.1f}' for resident, _ in samples)}"
            for (name, pid), samples in sorted(self._samples.items())
        )

    def assert_flat(self) -> None:
        bytes_grown, files_grown = self.growth()
        assert bytes_grown <= self.MAX_GROWTH_BYTES and files_grown <= self.MAX_GROWTH_FILES, self._samples
