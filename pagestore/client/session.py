"""A worker's session with the page store of its node, opened again whenever it ends. Runs on the asyncio thread and
touches no pages."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc

from tandem.pagestore.client.events import FromStore, StoreClosed, StoreOpened
from tandem.pagestore.messages import (
    STORE_CLIENT_CODEC,
    STORE_SERVER_CODEC,
    StoreClientMessage,
    StoreHello,
    StoreRefused,
    StoreWelcome,
)
from tandem.repeat_limit import RepeatLimit
from tandem.rpc.batch_writer import BatchWriter, is_cancelled
from tandem.rpc.calls import read_first, reason_of
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2_grpc
from tandem.worker.events import Event

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 5.0
# Pause before the next attempt, in seconds; doubled by each failure.
RETRY_DELAY_S = 0.2
MAX_RETRY_DELAY_S = 5.0


class StoreSession:
    """Events tell the engine thread of each session's begin, messages and end.

    A session opens only after all copies of the one before have ended, as its StoreHello states.
    """

    def __init__(
        self,
        address: str,
        hello: StoreHello,
        credentials: ClusterCredentials,
        post: Callable[[Event], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            address: of the store, which a restarted one keeps.
            begin: makes this process known as one that may copy; may block. Raises OSError: it did not.
        """
        self._address = address
        self._hello = hello
        self._credentials = credentials
        self._post = post
        self._begin = begin
        self._has_begun = False
        self._epoch = ""
        self._writer: BatchWriter | None = None
        self._failures = RepeatLimit()

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def send(self, epoch: str, messages: Sequence[StoreClientMessage]) -> None:
        """Sends messages of an epoch. Drops them if it has ended."""
        if self._writer is not None and epoch == self._epoch:
            self._writer.send(messages)

    async def run(self) -> None:
        """Runs until cancelled. The worker serves all the same while no store answers."""
        delay_s = RETRY_DELAY_S
        while True:
            try:
                if not self._has_begun:
                    await asyncio.to_thread(self._begin)
                    self._has_begun = True
                await self._run_once()
                delay_s = RETRY_DELAY_S
            except (grpc.RpcError, OSError, ValueError) as error:
                self._log_failure(reason_of(error) or type(error).__name__)
                delay_s = min(MAX_RETRY_DELAY_S, 2 * delay_s)
            except asyncio.CancelledError:
                # gRPC cancels calls whose messages it could not write; only our own cancellation ends the task.
                if is_cancelled():
                    raise
                self._log_failure("the call was cancelled")
            except Exception:
                # Without this task the worker would serve without a store for good, and a new store wait for its word.
                logger.exception("the session with the page store failed")
                delay_s = MAX_RETRY_DELAY_S
            await asyncio.sleep(delay_s)

    def _log_failure(self, reason: str) -> None:
        if self._failures.allows(reason):
            logger.warning("no page store at %s, serving without it: %s", self._address, reason)

    async def _run_once(self) -> None:
        """Runs one session to its end, and that of its copies. Raises an error if it did not open."""
        writer = BatchWriter(STORE_CLIENT_CODEC)
        self._hello = replace(self._hello, attempt=self._hello.attempt + 1)
        writer.send([self._hello])
        try:
            async with self._credentials.open_channel(self._address) as channel:
                stub = store_pb2_grpc.PageStoreStub(channel)
                call = stub.Session(writer.batches(), metadata=self._credentials.metadata)
                first = await read_first(call, WELCOME_TIMEOUT_S)
                (welcome, *rest) = STORE_SERVER_CODEC.decode(first)
                if isinstance(welcome, StoreRefused):
                    raise ConnectionError(f"refused: {welcome.reason}")
                if not isinstance(welcome, StoreWelcome):
                    raise ConnectionError(f"expected StoreWelcome, not {welcome!r}")
                await self._run_epoch(welcome, rest, call, writer)
        finally:
            writer.close()

    async def _run_epoch(
        self, welcome: StoreWelcome, rest: Sequence[object], call: grpc.aio.StreamStreamCall, writer: BatchWriter
    ) -> None:
        loop, quiet = asyncio.get_running_loop(), asyncio.Event()
        self._epoch, self._writer = welcome.epoch, writer
        self._failures.forget()
        logger.info("page store at %s: epoch %s of %d slots", self._address, welcome.epoch, welcome.num_slots)
        reason = "the stream ended"
        self._post(StoreOpened(welcome.epoch, welcome.num_slots))
        try:
            self._pass_on(rest)
            while (batch := await call.read()) is not grpc.aio.EOF:
                self._pass_on(STORE_SERVER_CODEC.decode(batch))
        except grpc.aio.AioRpcError as error:
            reason = error.details() or reason
        except Exception as error:
            reason = str(error) or type(error).__name__
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # The end of the call, like any other: copies may still run.
            reason = "the call was cancelled"
        finally:
            self._epoch, self._writer = "", None
            writer.close()
            self._post(StoreClosed(welcome.epoch, lambda: _set_threadsafe(loop, quiet)))
        self._log_failure(reason)
        await quiet.wait()

    def _pass_on(self, messages: Sequence[object]) -> None:
        for message in messages:
            self._post(FromStore(self._epoch, message))  # type: ignore[arg-type]


def _set_threadsafe(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
