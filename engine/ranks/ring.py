"""Messages of a worker's leader to its followers, in memory that all of them map."""

import struct
import time

NUM_SLOTS = 64
SLOT_BYTES = 64 * 1024
LINE_BYTES = 64
WAIT_INTERVAL_S = 50e-6

_WORD_BYTES = 8
# The part's number, its bytes, and the bytes of the message behind it. The number has a word of its own.
_HEADER = struct.Struct("<qii")
_LENGTHS = struct.Struct("<ii")
_ROOM = SLOT_BYTES - _HEADER.size


class Ring:
    """Fixed slots in memory. A message takes as many as it needs, one after another.

    A slot is overwritten only after all followers have taken its part. Each word has one writer and is stored whole; a
    part's number is stored after its bytes. This is enough on x86-64, where other cores see stores in order.
    """

    def __init__(self, memory: memoryview, num_followers: int, timeout_s: float) -> None:
        """
        Args:
            memory: num_bytes(num_followers) bytes, zeroed at first, aligned to LINE_BYTES.
            timeout_s: longest wait for a follower that has not taken its messages, in seconds.
        """
        self._timeout_s = timeout_s
        self._memory = memory[: self.num_bytes(num_followers)]
        self._words = self._memory.cast("q")
        self._acks = [follower * LINE_BYTES // _WORD_BYTES for follower in range(num_followers)]
        self._first_slot = num_followers * LINE_BYTES
        self._number = 0
        # Parts that all followers have taken, at least.
        self._num_taken = 0

    @staticmethod
    def num_bytes(num_followers: int) -> int:
        return num_followers * LINE_BYTES + NUM_SLOTS * SLOT_BYTES

    def close(self) -> None:
        """All readers have ended."""
        self._words.release()
        self._memory.release()

    def reader(self, rank: int) -> "RingReader":
        """Returns a follower's end. Args: rank: from 1."""
        return RingReader(self._memory, self._words, self._acks[rank - 1], self._first_slot)

    def write(self, message: bytes) -> None:
        """Writes a message; waits for slots that are still to be taken.

        Raises:
            TimeoutError: a follower stands still.
        """
        for start in range(0, len(message), _ROOM):
            part = message[start : start + _ROOM]
            if self._number - self._num_taken == NUM_SLOTS:
                self._wait()
            slot = self._first_slot + self._number % NUM_SLOTS * SLOT_BYTES
            self._number += 1
            _LENGTHS.pack_into(self._memory, slot + _WORD_BYTES, len(part), len(message) - start - len(part))
            first = slot + _HEADER.size
            self._memory[first : first + len(part)] = part
            self._words[slot // _WORD_BYTES] = self._number

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            taken = [self._words[ack] for ack in self._acks]
            self._num_taken = min(taken)
            if self._number - self._num_taken < NUM_SLOTS:
                return
            if time.monotonic() > deadline:
                late = taken.index(self._num_taken) + 1
                raise TimeoutError(f"rank {late} has taken no message for {self._timeout_s:g} s")
            time.sleep(WAIT_INTERVAL_S)


class RingReader:
    """A follower's end. Takes every message once, in order."""

    def __init__(self, memory: memoryview, words: memoryview, ack: int, first_slot: int) -> None:
        self._memory = memory
        self._words = words
        self._ack = ack
        self._first_slot = first_slot
        self._number = 0
        self._parts: list[bytes] = []

    def take(self) -> bytes | None:
        """Returns the next message; None if it has not been written whole."""
        while True:
            slot = self._first_slot + self._number % NUM_SLOTS * SLOT_BYTES
            if self._words[slot // _WORD_BYTES] != self._number + 1:
                return None
            num_bytes, num_left = _LENGTHS.unpack_from(self._memory, slot + _WORD_BYTES)
            first = slot + _HEADER.size
            self._parts.append(bytes(self._memory[first : first + num_bytes]))
            self._number += 1
            self._words[self._ack] = self._number
            if not num_left:
                message = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts = []
                return message
