"""One bidirectional gRPC stream of message batches, from either side."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from tandem.rpc.channel import MAX_MESSAGE_BYTES
from tandem.rpc.codec import BatchCodec

logger = logging.getLogger(__name__)

# One batch holds no more than this: many long prompts that come together go out in several, between which others have
# a turn.
MAX_BATCH_MESSAGES = 16
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES // 4


class BatchWriter:
    """Collects messages and writes all that have come together as one batch.

    Belongs to an asyncio loop and is used from its thread only. `send` never blocks: what a peer does not read waits
    here, until heartbeats find that peer lost and the stream is closed.

    Attributes:
        num_sent: messages that `send` was given.
        num_taken: those of them that are written, as far as gRPC's own buffers let it: the others wait here.
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
        """Ends `batches` once what was sent has been taken."""
        self._closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[Any]:
        """Protobuf batches, for gRPC to write; ends after close, or if a message cannot be encoded."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            for start in range(0, len(messages), MAX_BATCH_MESSAGES):
                together = messages[start : start + MAX_BATCH_MESSAGES]
                try:
                    encoded = list(self._encode(together))
                except Exception:
                    # To gRPC an error here is a cancelled call, which tells nobody anything.
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


def is_cancelled() -> bool:
    """Whether the current task was asked to end, as opposed to a call of it having been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
