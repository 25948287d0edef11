"""Measures transports: scattered KV pages from one process's pool into another's.

--over gpu  pages of 2 MiB (an 8B model in bfloat16, 16 tokens a page; half with --kv-cache-dtype fp8_e4m3) between two
            GPUs over nvlink and nccl, beside a plain copy
--over tcp  pages of 1.5 MiB between two CPU pools over loopback, plain and over TLS; CPU time is that of both ends, and
            "busy" adds a thread computing in Python at each end

Figures are medians of successive pushes. Over GPUs a push ends when the sender knows that its pages are read and,
one-sided, written; over tcp, when both ends are done.
"""

import asyncio
import os
import random
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.children import Child, cpu_s, questions
from benchmarks.rows import Row, argument_parser, report
from tandem.config import ClusterTls
from tandem.deploy.host.certificates import make_certificates
from tandem.deploy.host.gpu_opening import GpuOpening
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.config import KV_CACHE_DTYPES
from tandem.timer_slack import sleep_exactly

GPU_LAYOUTS = {
    name: KvHeadLayout(32, 16, 8, 128, "bfloat16", quantized_to) for name, quantized_to in KV_CACHE_DTYPES.items()
}
GPU_POOL_PAGES = 2048
GPU_PUSHES = 30
GPU_TRANSPORTS = ("nvlink", "nccl")
MANY, FEW = 512, 16
# Aims: at least these GB/s for MANY pages, at most these milliseconds for FEW.
MIN_GBPS = {"nvlink": 375.0, "nccl": 280.0}
MAX_MS = {"nvlink": 0.11, "nccl": 0.25}

TCP_LAYOUT = KvHeadLayout(24, 16, 8, 64, "float32")
TCP_PUSH_PAGES = 32
TCP_PUSHES = 15

TIMEOUT_S = 120.0
# Interval between looks at whether a push is over.
GPU_POLL_S = 0.000002
TCP_POLL_S = 0.0002


def _wait(completion: Any, poll_s: float) -> None:
    while not completion.done():
        # Sleeping leaves the interpreter to other threads, as the engine thread does: NCCL's transport has its own.
        time.sleep(poll_s)


# --- between two GPUs


def serve_gpu_end(pipe: Connection, visible: str, kv_cache_dtype: str) -> None:
    """Serve an end on one GPU: ("listen", transport), ("dial", transport, endpoint), ("expect", first number, pushes),
    ("push", first number, pushes) answered by each push's seconds, ("close",).
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    # Pins the process to the CPUs beside its GPU, as in a worker.
    GpuOpening().wait()
    import torch

    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.kvtransfer.transports.opening import load_transports, open_end
    from tandem.rpc.credentials import ClusterCredentials

    pool = CudaKvPool(GPU_LAYOUTS[kv_cache_dtype], GPU_POOL_PAGES, torch.device("cuda", 0))
    pool.memory.random_(0, 256)
    torch.cuda.synchronize()
    transports = load_transports(GPU_TRANSPORTS, pool, "127.0.0.1", ClusterCredentials())
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
                seconds = []
                for number, (src, dst) in enumerate(pushes, first):
                    began = time.perf_counter()
                    _wait(end.copy_pages(number, src, dst), GPU_POLL_S)
                    seconds.append(time.perf_counter() - began)
                pipe.send(seconds)
            case ("close",):
                _wait(end.abort(), 0.001)
                pipe.send(end.failure)


def serve_plain_copy(pipe: Connection) -> None:
    import torch

    src = torch.empty(2**30, dtype=torch.uint8, device="cuda:0").random_(0, 256)
    dst = torch.empty(2**30, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize(0)
        began = time.perf_counter()
        dst.copy_(src)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - began)
    pipe.send(src.nbytes / statistics.median(seconds) / 1e9)


def measure_gpu(name: str, page_bytes: int, sender: Child, receiver: Child) -> list[Row]:
    rng = random.Random(0)
    sender.ask(("dial", name, receiver.ask(("listen", name))), TIMEOUT_S)
    rows = []
    first = 0
    for num_pages in (MANY, FEW):
        pushes = [
            (rng.sample(range(GPU_POOL_PAGES), num_pages), rng.sample(range(GPU_POOL_PAGES), num_pages))
            for _ in range(GPU_PUSHES)
        ]
        receiver.ask(("expect", first, pushes))
        seconds = statistics.median(sender.ask(("push", first, pushes), TIMEOUT_S))
        first += GPU_PUSHES
        if num_pages == MANY:
            rate = num_pages * page_bytes / seconds / 1e9
            rows.append(Row(f"{name}, {num_pages} scattered pages", rate, "GB/s", low=MIN_GBPS[name]))
        else:
            rows.append(Row(f"{name}, {num_pages} scattered pages", seconds * 1e3, "ms", high=MAX_MS[name]))
    _close(sender, receiver)
    return rows


def measure_between_gpus(kv_cache_dtype: str) -> list[Row]:
    page_bytes = GPU_LAYOUTS[kv_cache_dtype].page_bytes
    with ExitStack() as stack:
        with Child(serve_plain_copy) as both:
            rows = [Row("a plain copy of 1 GiB", both.answer(), "GB/s")]
        receiver, sender = (
            stack.enter_context(Child(serve_gpu_end, visible, kv_cache_dtype)) for visible in ("1", "0")
        )
        for name in GPU_TRANSPORTS:
            rows += measure_gpu(name, page_bytes, sender, receiver)
    return rows


# --- over loopback


def serve_tcp_end(pipe: Connection) -> None:
    """Serve an end: ("listen", tls), ("dial", tls, endpoint), ("expect", number), ("push", number), ("busy", bool),
    ("close",).
    """
    from tandem.engine.kvcache.pool import CpuKvPool
    from tandem.kvtransfer.transports.tcp import Tcp
    from tandem.rpc.credentials import ClusterCredentials

    pool = CpuKvPool(TCP_LAYOUT, 2 * TCP_PUSH_PAGES, "tcp-benchmark")
    pool.memory.random_(0, 256)
    end: Any = None
    idle = threading.Event()
    for question in questions(pipe):
        match question:
            case ("listen", tls):
                end = Tcp(pool, "127.0.0.1", ClusterCredentials("", tls)).open_receiver()
                pipe.send(end.endpoint())
            case ("dial", tls, endpoint):
                end = Tcp(pool, "127.0.0.1", ClusterCredentials("", tls)).open_sender(endpoint)
                pipe.send(None)
            case ("expect", number):
                _wait(end.receive_pages(number, range(0, 2 * TCP_PUSH_PAGES, 2), TCP_PUSH_PAGES), TCP_POLL_S)
                pipe.send(None)
            case ("push", number):
                _wait(end.copy_pages(number, range(1, 2 * TCP_PUSH_PAGES, 2), range(TCP_PUSH_PAGES)), TCP_POLL_S)
                pipe.send(None)
            case ("busy", is_busy):
                if is_busy:
                    idle.clear()
                    threading.Thread(target=_compute, args=(idle,), daemon=True).start()
                else:
                    idle.set()
                pipe.send(None)
            case ("close",):
                _wait(end.abort(), TCP_POLL_S)
                pipe.send(end.failure)


def _compute(idle: threading.Event) -> None:
    sys.setswitchinterval(0.0002)
    while not idle.is_set():
        sum(range(1000))


def measure_tcp(name: str, tls: ClusterTls | None, sender: Child, receiver: Child, is_busy: bool) -> list[Row]:
    sender.ask(("dial", tls, receiver.ask(("listen", tls), TIMEOUT_S)), TIMEOUT_S)
    for end in (sender, receiver):
        end.ask(("busy", is_busy))
    seconds, cpu = [], []
    for number in range(TCP_PUSHES):
        began, cpu_before = time.perf_counter(), cpu_s(sender.pid) + cpu_s(receiver.pid)
        receiver.send(("expect", number))
        sender.send(("push", number))
        sender.answer(TIMEOUT_S)
        receiver.answer(TIMEOUT_S)
        seconds.append(time.perf_counter() - began)
        cpu.append(cpu_s(sender.pid) + cpu_s(receiver.pid) - cpu_before)
    for end in (sender, receiver):
        end.ask(("busy", False))
    _close(sender, receiver)
    gigabytes = TCP_PUSH_PAGES * TCP_LAYOUT.page_bytes / 1e9
    run = f"{name}, {'busy' if is_busy else 'idle'}"
    rows = [Row(f"{run}: pages", gigabytes / statistics.median(seconds), "GB/s")]
    if not is_busy:
        rows.append(Row(f"{run}: CPU time of both ends", statistics.median(cpu) / gigabytes, "s/GB"))
    return rows


def measure_over_tcp() -> list[Row]:
    rows: list[Row] = []
    with Child(serve_tcp_end) as receiver, Child(serve_tcp_end) as sender:
        for is_busy in (False, True):
            for name, tls in (("plain", None), ("TLS", make_certificates())):
                rows += measure_tcp(name, tls, sender, receiver, is_busy)
    return rows


def _close(*ends: Child) -> None:
    for end in ends:
        end.send(("close",))
    for end in ends:
        end.answer()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--over", choices=("gpu", "tcp"), default="gpu", help="(default: gpu, which needs two)")
    parser.add_argument("--kv-cache-dtype", choices=tuple(KV_CACHE_DTYPES), default="auto", help="of GPU pages")
    args = parser.parse_args()
    if args.over == "tcp":
        return report(measure_over_tcp(), "Pages over tcp on loopback", args.json)
    size = f"{GPU_LAYOUTS[args.kv_cache_dtype].page_bytes / 2**20:g} MiB"
    return report(measure_between_gpus(args.kv_cache_dtype), f"Pages of {size} between two GPUs", args.json)


if __name__ == "__main__":
    sys.exit(main())
