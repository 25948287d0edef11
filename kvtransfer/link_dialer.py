"""The sender's side of links over gRPC: dials receivers, opens the chosen transport and redials. Runs on the asyncio
thread and touches no pages or leases."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import grpc

from tandem.hosts import host_id
from tandem.kvtransfer.events import FromReceiver, SenderLinkClosed, SenderLinkFailed, SenderLinkOpened
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.transports.opening import OPEN_TIMEOUT_S, OpeningError
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
from tandem.repeat_limit import RepeatLimit
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.calls import call_errors, reason_of
from tandem.rpc.codec import RECEIVER_CODEC, SENDER_CODEC
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import kv_link_pb2_grpc
from tandem.worker.events import Event

logger = logging.getLogger(__name__)

# Timeout of the receiver's answer, besides opening its end.
HANDSHAKE_TIMEOUT_S = 5.0
RETRY_DELAY_S = 0.2
# Pause before all transports to a peer are tried again, in seconds.
REOPEN_DELAY_S = 5.0
STOP_TIMEOUT_S = 2.0


class _SenderEndError(Exception):
    """This worker's end of the chosen transport did not open."""

    def __init__(self, transport: str, reason: str) -> None:
        super().__init__(reason)
        self.transport = transport


class _NoTransportError(Exception):
    """The receiver has, or can open, none of the offered transports."""


class LinkDialer:
    """Keeps one link to each named decode worker.

    A transport that does not open here is not offered to that incarnation of the peer again. If none is left, the
    router is told, and all are tried again later.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        page_format: PageFormat,
        ranks: LinkRanks,
        post: Callable[[Event], None],
        credentials: ClusterCredentials,
    ) -> None:
        """Args: page_format: of pages with all heads."""
        self._ranks = ranks
        self._credentials = credentials
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._page_format = page_format
        self._post = post
        self._dialing: dict[Peer, asyncio.Task[None]] = {}
        self._ending: dict[Peer, set[asyncio.Task[None]]] = {}
        # Set when the copies of a peer incarnation's last epoch are over. It outlives the epoch's task, so no
        # cancellation opens the next epoch early.
        self._quiet: dict[Peer, asyncio.Event] = {}
        self._writers: dict[str, BatchWriter] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """A sender serves nothing."""

    def set_peers(self, peers: Sequence[Peer]) -> None:
        kept = set(peers)
        for peer in [p for p in self._dialing if p not in kept]:
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

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None:
        if epoch in self._writers:
            self._writers[epoch].send(messages)

    def close_link(self, epoch: str, reason: str) -> None:
        if epoch in self._writers:
            logger.warning("link epoch %s closed: %s", epoch, reason)
            self._writers[epoch].close()

    def mapped_workers(self) -> list[str]:
        return [peer.worker_id for peer, quiet in list(self._quiet.items()) if not quiet.is_set()]

    async def stop(self) -> None:
        self.set_peers(())
        tasks = [task for ending in self._ending.values() for task in ending]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)

    async def _keep_link(self, peer: Peer, before: Sequence[asyncio.Task[None]]) -> None:
        """Opens a peer's epochs one after the other until cancelled.

        Args:
            before: earlier tasks for this peer that have not ended.
        """
        if before:
            await asyncio.wait(before)
        # Reason of failure by transport.
        failures: dict[str, str] = {}
        limit = RepeatLimit()
        while True:
            try:
                with call_errors():
                    await self._run_epoch(peer, failures)
                limit.forget()
            except _SenderEndError as error:
                failures[error.transport] = str(error)
                left = [name for name in self._ranks.transports if name not in failures]
                what_next = f"{' or '.join(left)} is tried next" if left else "none is left"
                logger.warning(
                    "link to %s: transport %s cannot be opened: %s; %s",
                    peer.worker_id,
                    error.transport,
                    error,
                    what_next,
                )
                if not left:
                    await self._wait_without_transport(peer, failures, "")
                continue
            except _NoTransportError as error:
                logger.warning("link to %s: %s; none is left", peer.worker_id, error)
                await self._wait_without_transport(peer, failures, str(error))
                continue
            except (grpc.RpcError, TimeoutError, ConnectionError) as error:
                details = reason_of(error)
                if limit.allows(details):
                    logger.info("link to %s: %s", peer.worker_id, details)
            except Exception:
                # Keep trying: otherwise the pair of workers is lost.
                logger.exception("link to %s failed", peer.worker_id)
            await asyncio.sleep(RETRY_DELAY_S)

    async def _wait_without_transport(self, peer: Peer, failures: dict[str, str], refusal: str) -> None:
        """Reports failures at this end and the receiver's refusal, waits, and clears the failures."""
        reasons = [f"{name}: {reason}" for name, reason in failures.items()]
        reason = "; ".join([*reasons, refusal] if refusal else reasons)
        self._post(SenderLinkFailed(peer.worker_id, peer.incarnation, f"no transport can be opened: {reason}"))
        await asyncio.sleep(REOPEN_DELAY_S)
        failures.clear()

    async def _run_epoch(self, peer: Peer, failures: Mapping[str, str]) -> None:
        """Runs one epoch from its handshake to its end.

        Args:
            failures: transports not to offer, with reasons.

        Raises:
            _SenderEndError: the chosen transport does not open here.
            _NoTransportError: the receiver can use no offered transport.
            TimeoutError, ConnectionError: the handshake failed.
        """
        if peer in self._quiet:
            # No deadline: a copy that never completes must keep the next epoch closed. process.py detects a stuck
            # engine thread.
            await self._quiet[peer].wait()
        offer = [name for name in self._ranks.transports if name not in failures]
        writer = BatchWriter(SENDER_CODEC)
        writer.send([self._hello(peer, offer)])
        async with self._credentials.open_channel(peer.address) as channel:
            stub = kv_link_pb2_grpc.KvLinkStub(channel)
            call = stub.Link(writer.batches(), metadata=self._credentials.metadata)
            # The receiver may try each before it answers.
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S + len(offer) * OPEN_TIMEOUT_S):
                first = await call.read()
            if first is grpc.aio.EOF:
                raise ConnectionError("the receiver closed the stream at once")
            (welcome, *rest) = RECEIVER_CODEC.decode(first)
            opened = await self._open_transport(peer, welcome, offer)
            # No await between here and `try`: every opened epoch is reported as ended.
            self._writers[opened.epoch] = writer
            self._quiet[peer] = asyncio.Event()
            self._post(opened)
            passed_over = [*(f"{name}: {reason}" for name, reason in failures.items()), *welcome.passed_over]
            instead = "".join(f"; not {one}" for one in passed_over)
            logger.info("link to %s: pages go over %s%s", peer.worker_id, opened.transport_name, instead)
            reason = "the stream ended"
            try:
                for message in rest:
                    self._post(FromReceiver(opened.epoch, message))
                while (batch := await call.read()) is not grpc.aio.EOF:
                    for message in RECEIVER_CODEC.decode(batch):
                        self._post(FromReceiver(opened.epoch, message))
            except grpc.aio.AioRpcError as error:
                reason = error.details() or reason
            finally:
                self._tell_end(peer, opened.epoch, writer, reason)

    async def _open_transport(self, peer: Peer, answer: object, offer: Sequence[str]) -> SenderLinkOpened:
        """Opens the chosen transport's sender. Until then the epoch can touch no page."""
        if isinstance(answer, LinkRefused) and answer.no_transport:
            raise _NoTransportError(answer.reason)
        if not isinstance(answer, LinkWelcome):
            raise ConnectionError(f"refused: {answer.reason}" if isinstance(answer, LinkRefused) else str(answer))
        if answer.transport not in offer:
            raise ConnectionError(f"the receiver chose transport {answer.transport!r}, which was not offered")
        try:
            end = await self._ranks.open_sender(answer.transport, answer.heads, answer.endpoints)
        except ValueError as error:
            raise ConnectionError(f"the receiver's answer is wrong: {error}") from error
        except OpeningError as error:
            raise _SenderEndError(answer.transport, str(error)) from error
        return SenderLinkOpened(peer.worker_id, peer.incarnation, answer.epoch, answer.transport, end)

    def _tell_end(self, peer: Peer, epoch: str, writer: BatchWriter, reason: str) -> None:
        writer.close()
        del self._writers[epoch]
        loop = asyncio.get_running_loop()
        quiet = self._quiet[peer]
        self._post(SenderLinkClosed(epoch, reason, lambda: _set_threadsafe(loop, quiet)))

    def _hello(self, peer: Peer, offer: Sequence[str]) -> LinkHello:
        return LinkHello(
            PROTOCOL_VERSION,
            self._worker_id,
            self._incarnation,
            peer.incarnation,
            self._page_format,
            tuple(offer),
            self._ranks.ranks,
            host_id(),
        )


def _set_threadsafe(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
