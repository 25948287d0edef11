"""Measures the memory of one router with all workers connected, linked and heard from.

Messages pass the codec, as every message brings strings of its own. `tracemalloc` counts Python's objects, in a second
process; the resident size also counts what the allocator keeps.
"""

import argparse
import os
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from benchmarks.children import Child, rss_mib
from tandem.config import Role
from tandem.messages import PROTOCOL_VERSION, Heartbeat, Hello, LinkState, PageFormat, Shipped, WorkerStats
from tandem.router.config import RouterConfig
from tandem.router.process import make_policy
from tandem.router.router import Router
from tandem.rpc.codec import WORKER_CODEC

TIMEOUT_S = 1200.0


def roles_of(num_workers: int, *, linked: bool) -> dict[str, Role]:
    roles: list[Role] = ["both"] * num_workers if linked else ["decode", "prefill"] * (num_workers // 2)
    return {f"{role}-{number}": role for number, role in enumerate(roles)}


def messages_of(router: Router, name: str, role: str) -> Iterator[LinkState | Heartbeat]:
    worker = router.workers.get(name)
    assert worker is not None
    receivers = [peer.worker_id for peer in router.workers.peers_of(worker)] if role != "decode" else []
    for receiver in receivers:
        yield LinkState(receiver, f"{receiver}-0123456789ab", up=True)
    shipped = tuple(Shipped("nccl", 10**3, 10**9, receiver, 10**9) for receiver in receivers)
    yield Heartbeat(1, WorkerStats(num_total_pages=50_000, shipped=shipped))


def fill(pipe: Connection, roles: dict[str, Role], is_traced: bool) -> None:
    router = Router(RouterConfig("nowhere", "fake", 2000, workers=roles), make_policy("least_cost"))
    before = rss_mib(os.getpid())
    if is_traced:
        tracemalloc.start()
    for number, (name, role) in enumerate(roles.items()):
        address, life = f"10.0.{number // 8}.7:{20_000 + number}", f"{name}-0123456789ab"
        pages = PageFormat("fingerprint", 2**21, "layout")
        host = f"host-{number // 8}"
        hello = Hello(
            PROTOCOL_VERSION, name, life, role, "cuda:0", address, 1, pages, 50_000, 16, has_links=True, host=host
        )
        router.connect_worker(hello, lambda _: None, lambda _: None)
    for name, role in roles.items():
        worker = router.workers.get(name)
        assert worker is not None
        for message in messages_of(router, name, role):
            router.receive(worker, WORKER_CODEC.decode(WORKER_CODEC.encode([message]))[0])
    pipe.send(tracemalloc.get_traced_memory()[0] / 2**20 if is_traced else rss_mib(os.getpid()) - before)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 300, 1000], help="sizes (%(default)s)")
    args = parser.parse_args(argv)
    for linked in (False, True):
        for count in args.workers:
            found = []
            for is_traced in (False, True):
                with Child(fill, roles_of(count, linked=linked), is_traced) as child:
                    found.append(child.answer(TIMEOUT_S))
            layout = "of --workers" if linked else "half prefill"
            print(f"{count} workers, {layout}: {found[0]:.0f} MiB resident, {found[1]:.0f} MiB of objects", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
