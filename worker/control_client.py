"""A worker's end of its one stream to the router."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import grpc

from tandem.messages import Heartbeat, Hello, Peers, Welcome, WorkerMessage
from tandem.rpc.auth import cluster_metadata
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.channel import open_channel
from tandem.rpc.codec import ROUTER_CODEC, WORKER_CODEC
from tandem.v1 import worker_pb2_grpc
from worker.events import Event, FromRouter, RouterLost

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.2
WELCOME_TIMEOUT_S = 5.0


class ControlClient:
    """Keeps a Control stream to the router and opens a new one whenever it ends. On the asyncio thread."""

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        cluster_token: str,
        heartbeat: Callable[[], Heartbeat],
        heartbeat_interval_s: float,
        connect_timeout_s: float,
        post: Callable[[Event], None],
        on_peers: Callable[[Peers], None],
        on_connected: Callable[[], None],
    ) -> None:
        """
        Args:
            heartbeat: the current heartbeat.
            connect_timeout_s: how long the router may be out of reach before `run` gives up.
            post: tells the engine thread.
            on_peers: told which decode workers to keep links to.
            on_connected: called at every Welcome.
        """
        self._address = address
        self._hello = hello
        self._metadata = cluster_metadata(cluster_token)
        self._heartbeat = heartbeat
        self._heartbeat_interval_s = heartbeat_interval_s
        self._connect_timeout_s = connect_timeout_s
        self._post = post
        self._on_peers = on_peers
        self._on_connected = on_connected
        self._writer: BatchWriter | None = None
        self._connected = False

    def send(self, messages: Sequence[WorkerMessage]) -> None:
        """Sends to the router; without one, nobody waits for these messages and they are dropped."""
        if self._writer is not None and self._connected:
            self._writer.send(messages)

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            ConnectionError: no router was reached for connect_timeout_s.
        """
        last_connected = time.monotonic()
        while True:
            if await self._run_once():
                last_connected = time.monotonic()
            elif time.monotonic() - last_connected > self._connect_timeout_s:
                raise ConnectionError(f"no router at {self._address} for {self._connect_timeout_s:.0f} s")
            await asyncio.sleep(RETRY_DELAY_S)

    async def _run_once(self) -> bool:
        """One stream from its start to its end; returns whether the router welcomed this worker."""
        writer = self._writer = BatchWriter(WORKER_CODEC)
        writer.send([self._hello])
        beats: asyncio.Task[None] | None = None
        try:
            async with open_channel(self._address) as channel:
                call = worker_pb2_grpc.ClusterStub(channel).Control(writer.batches(), metadata=self._metadata)
                async with asyncio.timeout(WELCOME_TIMEOUT_S):
                    first = await call.read()
                if first is grpc.aio.EOF:
                    await call.code()
                    raise ConnectionError(await call.details())
                self._receive(ROUTER_CODEC.decode(first))
                beats = asyncio.create_task(self._beat(writer))
                while (batch := await call.read()) is not grpc.aio.EOF:
                    self._receive(ROUTER_CODEC.decode(batch))
                logger.info("the router ended the control stream: %s", await call.details() or "no reason given")
        except (grpc.RpcError, TimeoutError, ValueError, ConnectionError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.info("control stream to %s: %s", self._address, details)
        finally:
            writer.close()
            if beats is not None:
                beats.cancel()
            was_connected, self._connected = self._connected, False
            if was_connected:
                self._post(RouterLost())
        return was_connected

    def _receive(self, messages: Sequence[object]) -> None:
        for message in messages:
            if isinstance(message, Welcome):
                self._connected = True
                self._on_connected()
                self._post(FromRouter(message))
            elif isinstance(message, Peers):
                self._on_peers(message)
            else:
                self._post(FromRouter(message))  # type: ignore[arg-type]

    async def _beat(self, writer: BatchWriter) -> None:
        while True:
            writer.send([self._heartbeat()])
            await asyncio.sleep(self._heartbeat_interval_s)
