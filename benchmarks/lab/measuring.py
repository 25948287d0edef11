"""All experiments, one cluster after the other; what was measured is kept, whatever fails."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.lab.burst import measure_burst, warm_up
from benchmarks.lab.cache import measure_cache
from benchmarks.lab.concurrency import measure_concurrency
from benchmarks.lab.runs import LoadError
from benchmarks.lab.sizes import Sizes
from benchmarks.lab.starts import resident, start_figures
from benchmarks.served import Served, StartError, within
from tandem.bench.clients.base import EndpointError
from tandem.client import TandemError

# Which workers, by the name that the results have for them, and what reports call them.
LAYOUTS = {"both": ("--both", "2"), "1p1d": ("--prefill", "1", "--decode", "1")}
LAYOUT_WORDS = {"both": "two workers of role `both`", "1p1d": "a prefill and a decode worker"}
FAILURES = (StartError, LoadError, EndpointError, TandemError, grpc.RpcError, TimeoutError, RuntimeError, OSError)


class Lab:
    """Attributes: results: of what has been measured so far, as JSON has it."""

    def __init__(self, flags: Sequence[str], sizes: Sizes, vocab_size: int, directory: Path, deadline: float) -> None:
        """
        Args:
            flags: of `tandem serve`, for all clusters.
            directory: for logs while clusters run.
            deadline: by the monotonic clock: what would end later is given up.
        """
        self._flags = list(flags)
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._directory = directory
        self._deadline = deadline
        self.results: dict[str, Any] = {"burst": {}, "concurrency": {}, "cache": {}, "starts": {}, "failures": {}}

    def run(self, on_progress: Callable[[str], None]) -> None:
        """Never raises for what a cluster or a load does: the results have it under `failures`.

        Args: on_progress: told what comes next; the results have all that came before.
        """
        sizes = self._sizes
        chunks = {"whole": ["--chunk-size", str(sizes.whole)], "chunked": ["--chunk-size", str(sizes.chunk)]}
        small = ["--num-pages", str(sizes.cache_pages), "--max-model-len", str(sizes.max_model_len)]
        # What says most comes first, in case time runs out.
        for name in ("both/whole", "1p1d/whole", "cache", "both/chunked", "1p1d/chunked"):
            on_progress(name)
            if name == "cache":
                self._attempt(name, [*LAYOUTS["1p1d"], *chunks["whole"], *small], self._cache)
            else:
                layout, chunk = name.split("/")
                self._attempt(name, [*LAYOUTS[layout], *chunks[chunk]], self._one_layout)

    def _attempt(self, name: str, flags: Sequence[str], use: Callable[[str, Served], None]) -> None:
        logs = self._directory / name.replace("/", "-")
        token_file = self._directory / "token"
        try:
            start_timeout_s = min(self._sizes.start_timeout_s, self._left_s())
            with Served([*self._flags, *flags], logs, start_timeout_s, token_file) as served:
                self.results["starts"][name] = start_figures(served)
                with within(self._left_s(), name):
                    use(name, served)
                self.results["starts"][name]["rss_mib_after"] = resident(served)
        except FAILURES as error:
            self.results["failures"][name] = str(error) or type(error).__name__
        finally:
            shutil.rmtree(logs, ignore_errors=True)

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _one_layout(self, name: str, served: Served) -> None:
        layout, chunk = name.split("/")
        words = f"{LAYOUT_WORDS[layout]}, {chunk} prefill"
        self.results["burst"][name] = measure_burst(served.address, words, self._sizes, self._vocab_size)
        if chunk == "whole":
            self.results["concurrency"][layout] = measure_concurrency(
                served.address, LAYOUT_WORDS[layout], self._sizes, self._vocab_size
            )

    def _cache(self, name: str, served: Served) -> None:
        warm_up(served.address, self._sizes, self._vocab_size)
        self.results["cache"] = measure_cache(served, self._sizes, self._vocab_size)
