"""A peer of a page store that does what the test says."""

import asyncio
from typing import Any

import grpc

from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2, store_pb2_grpc
from tests.fakes.peer_nodes import TOKEN, Node


class ScriptedPeer(store_pb2_grpc.PeerPagesServicer):
    """A peer that has every page, and sends what the test says."""

    def __init__(self, *parts: store_pb2.PagePart, identities: bytes | None = None, hangs: bool = False) -> None:
        self.parts = parts
        self.identities = identities
        self.hangs = hangs
        self.num_looks = 0
        self.num_cancelled = 0

    async def Look(self, request: Any, context: grpc.aio.ServicerContext) -> store_pb2.PageRun:
        self.num_looks += 1
        if self.hangs:
            try:
                await asyncio.sleep(60.0)
            finally:
                self.num_cancelled += 1
        identities = b"i" * 8 * len(request.keys) if self.identities is None else self.identities
        return store_pb2.PageRun(namespace="space", identities=identities)

    async def Fetch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        for part in self.parts:
            await context.write(part)
        if not self.parts:
            try:
                await asyncio.sleep(60.0)
            finally:
                self.num_cancelled += 1


async def add_scripted(own: Node, scripted: ScriptedPeer) -> Node:
    """Starts a scripted peer of `own`."""
    other = Node("scripted", 4, own.format, ClusterCredentials(TOKEN))
    other.serves = scripted
    await other.start()
    own.tier.set_peers([other.peer])
    return other
