"""The writing side of a gRPC stream of message batches."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from tandem.rpc.channel import MAX_MESSAGE_BYTES
from tandem.rpc.codec import BatchCodec

logger = logging.getLogger(__name__)

# Limits of a batch: between the batches of many long prompts, other tasks get a turn.
MAX_BATCH_MESSAGES = 16
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES // 4


class BatchWriter:
    """Writes all waiting messages as one batch, from an asyncio loop's thread.

    `send` never blocks: messages for a slow peer wait until heartbeats declare it lost.

    Attributes:
        num_sent: messages passed to `send`.
        num_taken: messages passed on to gRPC, within its flow control.
    """

    def __init__(self, codec: BatchCodec) -> None:
        self._codec = codec
        self._messages: list[Any] = []
        self._wake = asyncio.Event()
        self._closed = False
        self.num_sent = self.num_taken = 0

    def send(self, messages: Sequence[Any]) -> None:
        if not self._closed:
            self._messages.extend(messages)
            self.num_sent += len(messages)
            self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[Any]:
        """Yield protobuf batches for gRPC, until `close` or a message that cannot be encoded."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            for start in range(0, len(messages), MAX_BATCH_MESSAGES):
                together = messages[start : start + MAX_BATCH_MESSAGES]
                try:
                    encoded = list(self._encode(together))
                except Exception:
                    # gRPC would report the error only as a cancelled call.
                    logger.exception("the stream ends: a message could not be encoded")
                    self._closed = True
                    return
                for batch in encoded:
                    yield batch
                self.num_taken += len(together)
            if self._closed and not self._messages:
                return

    def _encode(self, messages: Sequence[Any]) -> Iterator[Any]:
        batch = self._codec.encode(messages)
        if len(messages) == 1 or batch.ByteSize() <= MAX_BATCH_BYTES:
            yield batch
        else:
            middle = len(messages) // 2
            yield from self._encode(messages[:middle])
            yield from self._encode(messages[middle:])
