"""Pages from one process's CPU pool into another's over transport tcp on loopback, plain and over TLS.

Each push is of scattered pages of 1.5 MiB, as of a model of 24 layers in float32, and lasts from when both ends are
told until both are done; medians, one push after the other. CPU time is of both ends together, for each GB. "busy" has
a thread at each end that computes in Python all the time, as an engine thread may.
"""

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

PAGE_BYTES = 3 * 2**19
NUM_PAGES = 64
PUSH_PAGES = 32
NUM_PUSHES = 15
TIMEOUT_S = 120.0


def serve_end(pipe: Connection) -> None:
    """Either end: ("listen", tls), ("dial", tls, endpoint), ("expect", number), ("push", number), ("busy", whether),
    ("close",)."""
    from tandem.engine.attention.layout import KvHeadLayout
    from tandem.engine.kvcache.pool import CpuKvPool
    from tandem.kvtransfer.transports.tcp import Tcp
    from tandem.rpc.credentials import ClusterCredentials

    pool = CpuKvPool(KvHeadLayout(24, 16, 8, 64, "float32"), NUM_PAGES, "tcp-benchmark")
    assert pool.layout.page_bytes == PAGE_BYTES
    pool.memory.random_(0, 256)
    end: Any = None
    idle = threading.Event()
    for question in questions(pipe):
        match question:
            case ("listen", tls):
                transport = Tcp(pool, "127.0.0.1", ClusterCredentials("", tls))
                end = transport.open_receiver()
                pipe.send(end.endpoint())
            case ("dial", tls, endpoint):
                transport = Tcp(pool, "127.0.0.1", ClusterCredentials("", tls))
                end = transport.open_sender(endpoint)
                pipe.send(None)
            case ("expect", number):
                _wait(end.receive_pages(number, range(0, 2 * PUSH_PAGES, 2), PUSH_PAGES))
                pipe.send(None)
            case ("push", number):
                _wait(end.copy_pages(number, range(1, 2 * PUSH_PAGES, 2), range(PUSH_PAGES)))
                pipe.send(None)
            case ("busy", True):
                idle.clear()
                threading.Thread(target=_compute, args=(idle,), daemon=True).start()
                pipe.send(None)
            case ("busy", False):
                idle.set()
                pipe.send(None)
            case ("close",):
                over = end.abort()
                _wait(over)
                pipe.send(end.failure)


def _wait(completion: Any) -> None:
    while not completion.done():
        time.sleep(0.0002)


def _compute(idle: threading.Event) -> None:
    """What a worker's engine thread has to do in Python, without an end."""
    sys.setswitchinterval(0.0002)
    while not idle.is_set():
        sum(range(1000))


def measure(name: str, tls: ClusterTls | None, sender: Child, receiver: Child, is_busy: bool) -> list[Row]:
    sender.ask(("dial", tls, receiver.ask(("listen", tls), TIMEOUT_S)), TIMEOUT_S)
    for end in (sender, receiver):
        end.ask(("busy", is_busy))
    seconds, cpu = [], []
    for number in range(NUM_PUSHES):
        began, cpu_before = time.perf_counter(), cpu_s(sender.pid) + cpu_s(receiver.pid)
        receiver.send(("expect", number))
        sender.send(("push", number))
        sender.answer(TIMEOUT_S)
        receiver.answer(TIMEOUT_S)
        seconds.append(time.perf_counter() - began)
        cpu.append(cpu_s(sender.pid) + cpu_s(receiver.pid) - cpu_before)
    for end in (sender, receiver):
        end.ask(("busy", False))
        end.send(("close",))
    for end in (sender, receiver):
        end.answer()
    gigabytes = PUSH_PAGES * PAGE_BYTES / 1e9
    what = f"{name}, {'busy' if is_busy else 'idle'}"
    rows = [Row(f"{what}: pages", gigabytes / statistics.median(seconds), "GB/s")]
    if not is_busy:
        rows.append(Row(f"{what}: CPU time of both ends", statistics.median(cpu) / gigabytes, "s/GB"))
    return rows


def main() -> int:
    from tandem.deploy.host.certificates import make_certificates

    args = argument_parser(__doc__).parse_args()
    rows: list[Row] = []
    with ExitStack() as stack:
        receiver, sender = (stack.enter_context(Child(serve_end)) for _ in range(2))
        for is_busy in (False, True):
            for name, tls in (("plain", None), ("TLS", make_certificates())):
                rows += measure(name, tls, sender, receiver, is_busy)
    return report(rows, "Pages over tcp on loopback", args.json)


if __name__ == "__main__":
    sys.exit(main())
