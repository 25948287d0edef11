"""Measures the page store of one worker: what copies cost, and what they save.

copies    GB/s between pool and store in each direction, beside a plain copy of the same run; the cost of registering
tiers     TTFT of a long prefix, computed, from the pool, from the store's memory and from its disk
host      CPU time of a worker's turns beside loads, with an engine that computes nothing
serving   two tables: ITL of running streams beside prompts that are loaded from the store and written to it, against
          the same prompts in the pool; hit rate of a killed worker's next requests, with and without the store

On GPUs the model's weights may be random. All parts are expected to take six minutes on one H200, copies half a minute
and tiers two of these. The store of tiers alone has a disk, so the others wait for none.

  python -m benchmarks.page_store --device cuda --model DIRECTORY --load-format dummy --out results
  python -m benchmarks.page_store --out results
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.page_store.copies import CpuEnds, Ends, measure_copies
from benchmarks.page_store.host import HostSizes, measure_host
from benchmarks.page_store.serving import Cluster
from benchmarks.page_store.sizes import SIZES, Sizes
from benchmarks.page_store.streams import compare, measure_streams
from benchmarks.page_store.tiers import measure_restart, measure_tiers
from benchmarks.rows import Row, row_json, table_of
from benchmarks.served import StartError
from benchmarks.steady_streams import add_model_arguments, serve_flags
from tandem.bench.clients.base import EndpointError
from tandem.client import TandemError

# Of Llama-3.1-8B in bfloat16; on CPUs one that is read and written by megabytes too.
_PAGE_BYTES = {"cuda": 2**21, "cpu": 2**20}


class Benchmark:
    """Attributes: flags: of `tandem serve`, without layout, pool and store."""

    def __init__(self, arguments: argparse.Namespace, sizes: Sizes, flags: Sequence[str]) -> None:
        self._arguments = arguments
        self._sizes = sizes
        self._flags = flags

    def copies(self) -> dict[str, list[Row]]:
        ends: Ends
        if self._arguments.device == "cuda":
            from benchmarks.page_store.cuda_ends import CudaEnds

            ends = CudaEnds(_PAGE_BYTES["cuda"], self._sizes.copied_bytes // _PAGE_BYTES["cuda"])
        else:
            ends = CpuEnds(_PAGE_BYTES["cpu"], self._sizes.copied_bytes // _PAGE_BYTES["cpu"])
        try:
            return {"copies": [*measure_copies(ends), *ends.rows()]}
        finally:
            ends.close()

    def tiers(self) -> dict[str, list[Row]]:
        sizes = self._sizes
        with tempfile.TemporaryDirectory(dir=self._arguments.disk) as disk:
            store = ("--store-memory", sizes.store_memory, "--store-disk", f"{disk}/store:{sizes.store_disk}")
            with self._cluster("tiers", ("--num-pages", str(sizes.small_pool_pages), *store)) as cluster:
                return {"tiers": measure_tiers(cluster, sizes)}

    def host(self) -> dict[str, list[Row]]:
        return {"host": measure_host(HostSizes())}

    def serving(self) -> dict[str, list[Row]]:
        """Two clusters: a small pool above a store, and a pool for everything without one."""
        sizes, vocab_size = self._sizes, self._arguments.vocab_size
        store = ("--num-pages", str(sizes.small_pool_pages), "--store-memory", sizes.store_memory)
        with self._cluster("store", store) as cluster:
            busy = measure_streams(cluster, sizes, vocab_size)
            restart = measure_restart(cluster, sizes, "with the store", has_store=True)
        with self._cluster("pool", ("--num-pages", str(sizes.large_pool_pages))) as cluster:
            idle = measure_streams(cluster, sizes, vocab_size)
            restart += measure_restart(cluster, sizes, "without the store", has_store=False)
        return {"restart": restart, "streams": compare(idle, busy)}

    def _cluster(self, name: str, flags: Sequence[str]) -> Cluster:
        all_flags = [*self._flags, "--both", "1", *self._sizes.flags, *flags]
        logs = self._arguments.out / f"{name}-logs"
        return Cluster(all_flags, logs, self._sizes.start_timeout_s, self._arguments.vocab_size)


PARTS: dict[str, Callable[[Benchmark], dict[str, list[Row]]]] = {
    "copies": Benchmark.copies,
    "tiers": Benchmark.tiers,
    "host": Benchmark.host,
    "serving": Benchmark.serving,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add: Any = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="in this order (default: all)")
    add("--disk", metavar="DIRECTORY", help="for the store's pages on disk (default: a temporary directory)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"argv": argv or sys.argv[1:]}
    is_ok = True
    with tempfile.TemporaryDirectory() as directory:
        flags = serve_flags(arguments, Path(directory))
        benchmark = Benchmark(arguments, SIZES[arguments.device], flags)
        for part in arguments.parts:
            try:
                tables = PARTS[part](benchmark)
            except (StartError, EndpointError, TandemError, RuntimeError, TimeoutError) as error:
                print(f"{part}: failed: {error}", flush=True)
                results[part], is_ok = {"failed": str(error)}, False
            else:
                for name, rows in tables.items():
                    Console().print(table_of(rows, name))
                    results[name] = [row_json(row) for row in rows]
                    is_ok = is_ok and all(row.ok for row in rows)
            (arguments.out / "page_store.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
