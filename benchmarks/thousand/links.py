"""Measures what an open link costs its two workers: descriptors, threads and memory.

Real dialers and a real server, in one process each over loopback, with the transport `tcp`: each end has a thread and a
connection of its own.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.children import Child, questions, rss_mib
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.transports.tcp import Tcp
from tandem.messages import Peer
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.link_ends import ReceiverEnd, SenderEnd, wait_until
from tests.fakes.page_layout import OpaqueLayout

OPEN_TIMEOUT_S = 300.0
# Links that have paid for everything shared.
NUM_FIRST = 8
Usage = tuple[int, int, float]


def transport(name: str) -> Tcp:
    return Tcp(CpuKvPool(OpaqueLayout(16, 64), 16, name), "127.0.0.1", ClusterCredentials())


def usage() -> Usage:
    """Returns this process's descriptors, threads, and memory in KiB."""
    counts = [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]
    return counts[0], counts[1], 1024 * rss_mib(os.getpid())


def serve(pipe: Connection) -> None:
    async def run() -> None:
        async with ReceiverEnd({"tcp": transport("receiver")}) as end:
            pipe.send(end.peer)
            asked = questions(pipe)
            while await asyncio.to_thread(next, asked, None) is not None:
                pipe.send(usage())

    asyncio.run(run())


async def dial(child: Child, peer: Peer, num_links: int) -> list[tuple[Usage, Usage]]:
    """Returns the usage of both ends after the first links and after all."""
    shared, found = transport("sender"), []
    ends: list[SenderEnd] = []
    for count in (NUM_FIRST, NUM_FIRST + num_links):
        while len(ends) < count:
            # A dialer has one link to each peer.
            end = SenderEnd({"tcp": shared}, worker_id=f"p{len(ends)}")
            end.links.set_peers([peer])
            ends.append(end)
            await wait_until(lambda: bool(ends[-1].opened), OPEN_TIMEOUT_S)
        found.append((usage(), await asyncio.to_thread(child.ask, "usage")))
    for end in ends:
        await end.__aexit__()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=200, help="(%(default)s)")
    args = parser.parse_args(argv)
    with Child(serve) as child:
        first, last = asyncio.run(dial(child, child.answer(), args.links))
    for name, before, after in zip(("sender", "receiver"), first, last, strict=True):
        files, threads, kib = ((new - old) / args.links for old, new in zip(before, after, strict=True))
        print(f"{name}: {files:.2f} descriptors, {threads:.2f} threads and {kib:.0f} KiB of each link")
    return 0


if __name__ == "__main__":
    sys.exit(main())
