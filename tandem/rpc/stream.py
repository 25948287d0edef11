"""One bidirectional gRPC stream of message batches, from either side."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tandem.rpc.codec import BatchCodec


class BatchWriter:
    """Collects messages and writes all that have come together as one batch.

    Belongs to an asyncio loop and is used from its thread only. `send` never blocks: what a peer does not read waits
    here, until heartbeats find that peer lost and the stream is closed.
    """

    def __init__(self, codec: BatchCodec) -> None:
        self._codec = codec
        self._messages: list[Any] = []
        self._wake = asyncio.Event()
        self._closed = False

    def send(self, messages: Sequence[Any]) -> None:
        if not self._closed:
            self._messages.extend(messages)
            self._wake.set()

    def close(self) -> None:
        """Ends `batches` once what was sent has been taken."""
        self._closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[Any]:
        """Protobuf batches, for gRPC to write; ends after close."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            if messages:
                yield self._codec.encode(messages)
            if self._closed and not self._messages:
                return
