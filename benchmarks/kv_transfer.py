"""Pages from one GPU's pool into another's, over each transport for GPUs, beside a plain copy in the same run.

Two processes have a GPU each, as workers do under Ray; a third one has both, for the plain copy. Pages are of 2 MiB, as
of an 8B model in bfloat16 with 16 tokens a page, or half as large with --kv-cache-dtype fp8_e4m3, and scattered at both
ends. A push lasts from when the sender is told until it knows that its pages are read and, one-sided, written; medians,
one push after the other.
"""

import asyncio
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.children import Child, questions
from benchmarks.rows import Row, argument_parser, report
from tandem.deploy.host.gpu_opening import GpuOpening
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.config import KV_CACHE_DTYPES
from tandem.timer_slack import sleep_exactly

# By what is said of its pages on the command line.
LAYOUTS = {
    name: KvHeadLayout(32, 16, 8, 128, "bfloat16", quantized_to) for name, quantized_to in KV_CACHE_DTYPES.items()
}
NUM_PAGES = 2048
NUM_PUSHES = 30
# Of these transports, pages in a push: at least so many GB/s, or at most so many milliseconds.
TRANSPORTS = ("nvlink", "nccl")
MIN_GBPS = {"nvlink": 375.0, "nccl": 280.0}
MAX_MS = {"nvlink": 0.11, "nccl": 0.25}
MANY, FEW = 512, 16
TIMEOUT_S = 60.0
# Whether a push is over is looked at so often, and a little later than that.
LOOK_S = 0.000002


def serve_end(pipe: Connection, visible: str, kv_cache_dtype: str) -> None:
    """Either end, on one GPU: ("listen", transport), ("dial", transport, endpoint), ("expect", first number, pushes),
    ("push", first number, pushes), which gives each push's seconds."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    # As a worker does, it keeps to the CPUs beside its GPU.
    GpuOpening().wait()
    import torch

    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.kvtransfer.transports.opening import load_transports, open_end
    from tandem.rpc.credentials import ClusterCredentials

    pool = CudaKvPool(LAYOUTS[kv_cache_dtype], NUM_PAGES, torch.device("cuda", 0))
    pool.memory.random_(0, 256)
    torch.cuda.synchronize()
    transports = load_transports(TRANSPORTS, pool, "127.0.0.1", ClusterCredentials())
    end: Any = None
    for question in questions(pipe):
        match question:
            case ("listen", name):
                end = asyncio.run(open_end(transports[name].open_receiver))
                pipe.send(end.endpoint())
            case ("dial", name, endpoint):
                end = asyncio.run(open_end(lambda: transports[name].open_sender(endpoint)))
                pipe.send(None)
            case ("expect", first, pushes):
                if end.two_sided:
                    for number, (_, dst) in enumerate(pushes, first):
                        end.receive_pages(number, dst, len(dst))
                pipe.send(None)
            case ("push", first, pushes):
                sleep_exactly()
                pipe.send([_seconds(end, number, *push) for number, push in enumerate(pushes, first)])
            case ("close",):
                over = end.abort()
                while not over.done():
                    time.sleep(0.001)
                pipe.send(end.failure)


def _seconds(sender: Any, number: int, src: list[int], dst: list[int]) -> float:
    started = time.perf_counter()
    copied = sender.copy_pages(number, src, dst)
    while not copied.done():
        # As the engine thread does, it leaves the interpreter to other threads: NCCL's transport has its own.
        time.sleep(LOOK_S)
    return time.perf_counter() - started


def serve_plain_copy(pipe: Connection) -> None:
    """Says how many GB/s a copy of 1 GiB from one GPU to the other makes."""
    import torch

    src = torch.empty(2**30, dtype=torch.uint8, device="cuda:0").random_(0, 256)
    dst = torch.empty(2**30, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        dst.copy_(src)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - started)
    pipe.send(src.nbytes / statistics.median(seconds) / 1e9)


def measure(name: str, page_bytes: int, sender: Child, receiver: Child) -> list[Row]:
    rng = random.Random(0)
    sender.ask(("dial", name, receiver.ask(("listen", name))), TIMEOUT_S)
    rows = []
    first = 0
    for num_pages in (MANY, FEW):
        pushes = [
            (rng.sample(range(NUM_PAGES), num_pages), rng.sample(range(NUM_PAGES), num_pages))
            for _ in range(NUM_PUSHES)
        ]
        receiver.ask(("expect", first, pushes))
        seconds = statistics.median(sender.ask(("push", first, pushes), TIMEOUT_S))
        first += NUM_PUSHES
        if num_pages == MANY:
            rate = num_pages * page_bytes / seconds / 1e9
            rows.append(Row(f"{name}, {num_pages} scattered pages", rate, "GB/s", low=MIN_GBPS[name]))
        else:
            rows.append(Row(f"{name}, {num_pages} scattered pages", seconds * 1e3, "ms", high=MAX_MS[name]))
    for end in (sender, receiver):
        end.send(("close",))
    for end in (sender, receiver):
        end.answer()
    return rows


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--kv-cache-dtype", choices=tuple(KV_CACHE_DTYPES), default="auto", help="of the pages")
    args = parser.parse_args()
    page_bytes = LAYOUTS[args.kv_cache_dtype].page_bytes
    with ExitStack() as stack:
        with Child(serve_plain_copy) as both:
            rows = [Row("a plain copy of 1 GiB", both.answer(), "GB/s")]
        receiver, sender = (
            stack.enter_context(Child(serve_end, visible, args.kv_cache_dtype)) for visible in ("1", "0")
        )
        for name in TRANSPORTS:
            rows += measure(name, page_bytes, sender, receiver)
    return report(rows, f"Pages of {page_bytes / 2**20:g} MiB between two GPUs", args.json)


if __name__ == "__main__":
    sys.exit(main())
