"""A served cluster, its answers by tier, and deaths of its processes."""

import os
import random
import signal
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.served import Served
from tandem.client import TandemClient
from tandem.v1 import inference_pb2 as pb

_TIMEOUT_S = 120.0
_POLL_S = 0.05
# Longer than a worker takes to offer a page, and the store to answer.
_QUIET_S = 1.0
_WARM_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """A served request. Attributes: ttft_s: from sending to the first token."""

    ttft_s: float
    usage: pb.Usage

    @property
    def tokens(self) -> dict[str, int]:
        """Prompt tokens by the tier that held them."""
        of_store = {"host": self.usage.host_tokens, "disk": self.usage.disk_tokens}
        pool = self.usage.cached_tokens - sum(of_store.values()) - self.usage.peer_tokens
        return {"pool": pool, **of_store, "computed": self.usage.prompt_tokens - self.usage.cached_tokens}


class Cluster:
    """Use as a context manager."""

    def __init__(self, flags: Sequence[str], log_dir: Path, start_timeout_s: float, vocab_size: int) -> None:
        """Raises StartError."""
        self.served = Served(flags, log_dir, start_timeout_s)
        self._client = TandemClient(self.served.address)
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.served.close()

    def prompt(self, num_tokens: int) -> list[int]:
        return self._rng.choices(range(256, self._vocab_size), k=num_tokens)

    def ask(self, prompt_ids: Sequence[int], max_tokens: int = 1) -> Asked:
        """Raises TandemError."""
        sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt_ids), sampling=sampling)
        began, ttft_s, last = time.perf_counter(), 0.0, pb.GenerateResponse()
        for last in self._client.generate(request, timeout_s=_TIMEOUT_S):
            if last.token_ids and not ttft_s:
                ttft_s = time.perf_counter() - began
        return Asked(ttft_s, last.usage)

    def warm_up(self, num_tokens: int) -> None:
        """Serve prompts that share nothing with any other."""
        for _ in range(_WARM_PROMPTS):
            self.ask(self.prompt(num_tokens), max_tokens=4)

    def kill_workers(self) -> float:
        """Kill all workers; return the seconds until others are ready. Raises TimeoutError."""
        return self._replace({worker.pid for worker in self._client.server_info().workers})

    def kill_store_and_workers(self) -> float:
        """As `kill_workers`. The store's memory is empty afterwards."""
        info = self._client.server_info()
        return self._replace({worker.pid for worker in info.workers} | {store.pid for store in info.stores})

    def wait_stored(self) -> None:
        """Wait until the store has written all pages, and each worker has a session. Raises TimeoutError."""
        deadline = time.monotonic() + _TIMEOUT_S
        num_written, changed = -1.0, time.monotonic()
        while time.monotonic() < deadline:
            metrics = self._store_metrics()
            if metrics.get("written_pages_total", 0.0) != num_written:
                num_written, changed = metrics.get("written_pages_total", 0.0), time.monotonic()
            num_busy = metrics.get("disk_queue_pages", 0.0) + metrics.get("slots.writing", 0.0)
            has_sessions = metrics.get("sessions") == len(self._client.server_info().workers)
            if has_sessions and not num_busy and time.monotonic() > changed + _QUIET_S:
                return
            time.sleep(_POLL_S)
        raise TimeoutError(f"the store is not idle within {_TIMEOUT_S:g} s")

    def _store_metrics(self) -> dict[str, float]:
        """Return values by name and state; empty while there is no store."""
        for store in self._client.server_info().stores:
            try:
                with urllib.request.urlopen(f"http://{store.metrics_address}/metrics", timeout=_TIMEOUT_S) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            return {_name_of(sample): sample.value for sample in samples}
        return {}

    def _replace(self, before: set[int]) -> float:
        began = time.monotonic()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        while time.monotonic() - began < _TIMEOUT_S:
            info = self._client.server_info()
            pids = {worker.pid for worker in info.workers if worker.alive}
            pids |= {store.pid for store in info.stores if store.alive}
            if info.ready and len(pids) == len(info.workers) + len(info.stores) and not pids & before:
                return time.monotonic() - began
            time.sleep(_POLL_S)
        raise TimeoutError(f"no replacements within {_TIMEOUT_S:g} s")


def _name_of(sample: Sample) -> str:
    """Return a metric's name without the store's, and its state."""
    return ".".join(filter(None, (sample.name.removeprefix("tandem_store_"), sample.labels.get("state"))))
