"""Links over gRPC: the sender dials, the receiver serves. On the asyncio thread; pages and leases are not touched
here."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvtransfer.events import FromLink, LinkClosed, ReceiverLinkOpened, SenderLinkOpened
from kvtransfer.transports.factory import TransportFactory
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
from tandem.rpc.auth import cluster_metadata
from tandem.rpc.batch_writer import BatchWriter, is_cancelled
from tandem.rpc.channel import open_channel
from tandem.rpc.codec import RECEIVER_CODEC, SENDER_CODEC
from tandem.v1 import kv_link_pb2_grpc
from worker.events import Event

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
RETRY_DELAY_S = 0.2
STOP_TIMEOUT_S = 2.0
# After a sender's exit was seen, how long until its pages are reused: what it had submitted last has landed by then.
SETTLE_S = 0.2


class LinkDialer:
    """The sender's side: keeps one link to each decode worker that the router names."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        page_format: PageFormat,
        transports: TransportFactory,
        post: Callable[[Event], None],
        cluster_token: str,
    ) -> None:
        self._transports = transports
        self._metadata = cluster_metadata(cluster_token)
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._page_format = page_format
        self._post = post
        self._dialing: dict[Peer, asyncio.Task[None]] = {}
        # Cancelled tasks that have not ended yet.
        self._ending: dict[Peer, set[asyncio.Task[None]]] = {}
        # For each life of a peer, when the copies of its last epoch are over. Put here before the engine thread is told
        # of the epoch's end, and outliving the task that ran it: no cancellation opens the next epoch early.
        self._quiet: dict[Peer, asyncio.Event] = {}
        self._writers: dict[str, BatchWriter] = {}  # by epoch

    def add_to(self, server: grpc.aio.Server) -> None:
        """A sender serves nothing."""

    def set_peers(self, peers: Sequence[Peer]) -> None:
        for peer in [p for p in self._dialing if p not in peers]:
            task = self._dialing.pop(peer)
            task.cancel()
            self._ending.setdefault(peer, set()).add(task)
            task.add_done_callback(lambda done, peer=peer: self._has_ended(peer, done))  # type: ignore[misc]
        for peer in peers:
            if peer not in self._dialing:
                before = tuple(self._ending.get(peer, ()))
                self._dialing[peer] = asyncio.create_task(self._keep_link(peer, before))

    def _has_ended(self, peer: Peer, task: asyncio.Task[None]) -> None:
        self._ending[peer].discard(task)
        if not self._ending[peer]:
            del self._ending[peer]

    def send(self, epoch: str, messages: Sequence[Any]) -> None:
        if epoch in self._writers:
            self._writers[epoch].send(messages)

    def close_link(self, epoch: str, reason: str) -> None:
        if epoch in self._writers:
            logger.warning("link epoch %s closed: %s", epoch, reason)
            self._writers[epoch].close()

    async def stop(self) -> None:
        self.set_peers(())
        tasks = [task for ending in self._ending.values() for task in ending]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)

    async def _keep_link(self, peer: Peer, before: Sequence[asyncio.Task[None]]) -> None:
        """Args: before: what still ends earlier links to the same life of the peer."""
        if before:
            await asyncio.wait(before)
        while True:
            try:
                await self._run_epoch(peer)
            except (grpc.RpcError, TimeoutError, ConnectionError) as error:
                details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                logger.info("link to %s: %s", peer.worker_id, details)
            except asyncio.CancelledError:
                # gRPC cancels a call whose messages it could not write; only who cancelled this task ends it.
                if is_cancelled():
                    raise
                logger.error("link to %s: the call was cancelled", peer.worker_id)
            except Exception:
                # Whatever went wrong with this epoch, the next one may work; without it the pair would be lost.
                logger.exception("link to %s failed", peer.worker_id)
            await asyncio.sleep(RETRY_DELAY_S)

    async def _run_epoch(self, peer: Peer) -> None:
        if peer in self._quiet:
            # Without a deadline on purpose: a copy that never completes must keep the next epoch shut. A stuck engine
            # thread is noticed elsewhere.
            await self._quiet[peer].wait()
        writer = BatchWriter(SENDER_CODEC)
        writer.send([self._hello(peer)])
        async with open_channel(peer.address) as channel:
            call = kv_link_pb2_grpc.KvLinkStub(channel).Link(writer.batches(), metadata=self._metadata)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                first = await call.read()
            if first is grpc.aio.EOF:
                raise ConnectionError("the receiver closed the stream at once")
            (answer, *rest) = RECEIVER_CODEC.decode(first)
            if not isinstance(answer, LinkWelcome):
                raise ConnectionError(f"refused: {answer.reason}" if isinstance(answer, LinkRefused) else str(answer))
            self._writers[answer.epoch] = writer
            self._post(SenderLinkOpened(peer.worker_id, peer.incarnation, answer))
            reason = "the stream ended"
            try:
                for message in rest:
                    self._post(FromLink(answer.epoch, message))
                while (batch := await call.read()) is not grpc.aio.EOF:
                    for message in RECEIVER_CODEC.decode(batch):
                        self._post(FromLink(answer.epoch, message))
            except grpc.aio.AioRpcError as error:
                reason = error.details() or reason
            finally:
                self._end_epoch(peer, answer.epoch, writer, reason)

    def _end_epoch(self, peer: Peer, epoch: str, writer: BatchWriter, reason: str) -> None:
        """Tells the engine thread, which says when none of the epoch's copies runs any more."""
        writer.close()
        del self._writers[epoch]
        loop = asyncio.get_running_loop()
        quiet = self._quiet[peer] = asyncio.Event()
        self._post(LinkClosed(epoch, reason, lambda: _set_threadsafe(loop, quiet)))

    def _hello(self, peer: Peer) -> LinkHello:
        return LinkHello(
            PROTOCOL_VERSION,
            self._worker_id,
            self._incarnation,
            os.getpid(),
            peer.incarnation,
            self._page_format,
            self._transports.names,
        )


def _set_threadsafe(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


class LinkServer(kv_link_pb2_grpc.KvLinkServicer):
    """The receiver's side: accepts links from prefill workers."""

    def __init__(
        self,
        incarnation: str,
        page_format: PageFormat,
        transports: TransportFactory,
        post: Callable[[Event], None],
    ) -> None:
        self._incarnation = incarnation
        self._page_format = page_format
        self._transports = transports
        self._post = post
        self._writers: dict[str, BatchWriter] = {}  # by epoch

    def add_to(self, server: grpc.aio.Server) -> None:
        kv_link_pb2_grpc.add_KvLinkServicer_to_server(self, server)

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """A receiver dials nobody."""

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None:
        if epoch in self._writers:
            self._writers[epoch].send(messages)

    def close_link(self, epoch: str, reason: str) -> None:
        if epoch in self._writers:
            logger.warning("link epoch %s closed: %s", epoch, reason)
            self._writers[epoch].close()

    async def stop(self) -> None:
        for writer in self._writers.values():
            writer.close()

    async def Link(self, batches: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                (hello, *rest) = SENDER_CODEC.decode(await anext(aiter(batches)))
        except (StopAsyncIteration, TimeoutError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link begins with LinkHello")
            return
        refusal = self._refusal(hello)
        name = self._transports.choose(hello.transports) if isinstance(hello, LinkHello) else None
        if refusal or name is None or not isinstance(hello, LinkHello):
            yield RECEIVER_CODEC.encode([LinkRefused(refusal)])
            return
        transport = self._transports.open_receiver(name)
        epoch = uuid.uuid4().hex
        writer = self._writers[epoch] = BatchWriter(RECEIVER_CODEC)
        writer.send([LinkWelcome(epoch, name, transport.endpoint())])
        self._post(ReceiverLinkOpened(epoch, hello, transport, _ExitWatch(hello.sender_pid).is_gone))
        for message in rest:
            self._post(FromLink(epoch, message))
        reader = asyncio.create_task(self._read(epoch, batches, writer))
        try:
            async for batch in writer.batches():
                yield batch
        finally:
            reader.cancel()
            writer.close()
            del self._writers[epoch]
            self._post(LinkClosed(epoch, "the stream ended", lambda: None))

    async def _read(self, epoch: str, batches: AsyncIterator[Any], writer: BatchWriter) -> None:
        try:
            async for batch in batches:
                for message in SENDER_CODEC.decode(batch):
                    self._post(FromLink(epoch, message))
        except (grpc.RpcError, ValueError) as error:
            logger.warning("link epoch %s: %s", epoch, error)
        finally:
            writer.close()

    def _refusal(self, hello: object) -> str:
        """Why a link must not open, or "": whatever differs would corrupt pages later."""
        if not isinstance(hello, LinkHello):
            return "a link begins with LinkHello"
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol_version} is not {PROTOCOL_VERSION}"
        if hello.receiver_incarnation != self._incarnation:
            return "this worker has restarted since the router named it"
        if hello.page_format != self._page_format:
            return f"pages differ: {hello.page_format} at the sender, {self._page_format} here"
        if self._transports.choose(hello.transports) is None:
            return f"no common transport: {hello.transports} at the sender, {self._transports.names} here"
        return ""


class _ExitWatch:
    """Whether a process of this host has exited, and SETTLE_S have passed since that was seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start_time = _start_time(pid)
        self._gone_since: float | None = None

    def is_gone(self) -> bool:
        if self._start_time is None:
            # Never seen alive from here, so its end cannot be seen either.
            return False
        if self._gone_since is None:
            if _start_time(self._pid) == self._start_time:
                return False
            self._gone_since = time.monotonic()
        return time.monotonic() - self._gone_since >= SETTLE_S


def _start_time(pid: int) -> str | None:
    """When a process was started, in ticks since boot; None if there is none that could still write."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A process whose main thread has ended is a zombie already while its other threads may write.
    return None if fields[0] in "ZX" and int(fields[17]) <= 1 else fields[19]
