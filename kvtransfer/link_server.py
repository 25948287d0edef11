"""The receiver's side of links over gRPC: checks senders and opens the best transport. Runs on the asyncio thread and
touches no pages or leases."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from tandem.exit_watch import ExitWatches
from tandem.hosts import host_id
from tandem.kvtransfer.events import FromSender, ReceiverLinkClosed, ReceiverLinkOpened
from tandem.kvtransfer.lanes.plan import plan_lanes
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.transport_choice import NoTransportError, choose_transport
from tandem.kvtransfer.transports.opening import let_go
from tandem.messages import (
    PROTOCOL_VERSION,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    PageFormat,
    Peer,
    ReceiverMessage,
    SenderMessage,
)
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.codec import RECEIVER_CODEC, SENDER_CODEC
from tandem.v1 import kv_link_pb2_grpc
from tandem.worker.events import Event

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0


class LinkServer(kv_link_pb2_grpc.KvLinkServicer):
    """Accepts links from prefill workers, over the sender's first transport that both ends have and that opens here."""

    def __init__(
        self,
        incarnation: str,
        page_format: PageFormat,
        ranks: LinkRanks,
        post: Callable[[Event], None],
    ) -> None:
        """Args: page_format: of pages with all heads."""
        self._incarnation = incarnation
        self._page_format = page_format
        self._ranks = ranks
        self._post = post
        self._writers: dict[str, BatchWriter] = {}
        # Newest hello of each sender incarnation whose link is being opened: a late hello of an earlier one must not
        # replace it.
        self._newest: dict[tuple[str, str], LinkHello] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        kv_link_pb2_grpc.add_KvLinkServicer_to_server(self, server)

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """A receiver does not dial."""

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None:
        if epoch in self._writers:
            self._writers[epoch].send(messages)

    def close_link(self, epoch: str, reason: str) -> None:
        if epoch in self._writers:
            logger.warning("link epoch %s closed: %s", epoch, reason)
            self._writers[epoch].close()

    def mapped_workers(self) -> list[str]:
        return []

    async def stop(self) -> None:
        for writer in self._writers.values():
            writer.close()

    async def Link(self, batches: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                (hello, *rest) = SENDER_CODEC.decode(await anext(aiter(batches)))
        except (StopAsyncIteration, TimeoutError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link begins with LinkHello")
            return
        if not isinstance(hello, LinkHello):
            yield RECEIVER_CODEC.encode([LinkRefused("a link begins with LinkHello")])
            return
        if refusal := self._refusal(hello):
            yield RECEIVER_CODEC.encode([LinkRefused(refusal)])
            return
        life = hello.sender_id, hello.sender_incarnation
        self._newest[life] = hello
        try:
            name, transport, endpoints, passed_over = await choose_transport(hello, self._ranks)
        except NoTransportError as error:
            yield RECEIVER_CODEC.encode([LinkRefused(str(error), no_transport=True)])
            return
        finally:
            is_newest = self._newest.get(life) is hello
            if is_newest:
                del self._newest[life]
        if not is_newest:
            # Report epochs in the sender's order: the later one closes the earlier.
            let_go(transport)
            yield RECEIVER_CODEC.encode([LinkRefused("the sender has begun another link since")])
            return
        # No await between the opening and `try`: every opened epoch is closed.
        epoch = uuid.uuid4().hex
        writer = self._writers[epoch] = BatchWriter(RECEIVER_CODEC)
        writer.send([LinkWelcome(epoch, name, self._ranks.heads, endpoints, passed_over)])
        # On another host process ids mean nothing.
        pids = [rank.pid for rank in hello.ranks]
        is_gone = ExitWatches.of(pids).are_gone if hello.sender_host == host_id() else _never
        self._post(ReceiverLinkOpened(epoch, hello, transport, is_gone))
        for message in rest:
            self._post(FromSender(epoch, message))
        reader = asyncio.create_task(self._read(epoch, batches, writer))
        try:
            async for batch in writer.batches():
                yield batch
        finally:
            reader.cancel()
            writer.close()
            del self._writers[epoch]
            self._post(ReceiverLinkClosed(epoch))

    async def _read(self, epoch: str, batches: AsyncIterator[Any], writer: BatchWriter) -> None:
        try:
            async for batch in batches:
                for message in SENDER_CODEC.decode(batch):
                    self._post(FromSender(epoch, message))
        except (grpc.RpcError, ValueError) as error:
            logger.warning("link epoch %s: %s", epoch, error)
        finally:
            writer.close()

    def _refusal(self, hello: LinkHello) -> str:
        """Returns the reason to refuse a link, or "". Any mismatch would corrupt pages."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol_version} is not {PROTOCOL_VERSION}"
        if hello.receiver_incarnation != self._incarnation:
            return "this worker has restarted since the router named it"
        if mismatch := hello.page_format.mismatch(self._page_format, "the sender", "the receiver"):
            return mismatch
        try:
            plan_lanes([rank.heads for rank in hello.ranks], self._ranks.heads)
        except ValueError as error:
            return str(error)
        return ""


def _never() -> bool:
    return False
