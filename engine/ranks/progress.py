"""Progress of a worker's ranks, in shared memory."""

from ctypes import addressof, c_int64
from enum import IntEnum

from tandem.engine.ranks.config import RankConfig

# A cache line for each rank, and one for the orders to all.
LINE_BYTES = 64
_WORD_BYTES = 8
_WORDS_PER_LINE = LINE_BYTES // _WORD_BYTES


class _Order(IntEnum):
    ABORT = 0
    STOP = 1


class _Word(IntEnum):
    BEAT = 0
    COMPLETED_FORWARD = 1
    PULSE = 2
    LANES_BEAT = 3
    ENDED_LOAD = 4
    FAILED_LOAD = 5


class Progress:
    """Counters of each rank and orders to all, without locks: each word has one writer and is stored whole."""

    def __init__(self, memory: memoryview, degree: int) -> None:
        """Args: memory: num_bytes(degree) bytes, zeroed, aligned to LINE_BYTES."""
        self.degree = degree
        self._words = memory[: self.num_bytes(degree)].cast("q")

    @staticmethod
    def num_bytes(degree: int) -> int:
        return (1 + degree) * LINE_BYTES

    def close(self) -> None:
        self._words.release()

    def beat(self, ranks: RankConfig) -> None:
        """Shows that a rank's loop moves."""
        self._words[_index(ranks.rank, _Word.BEAT)] += 1

    def beat_lanes(self, ranks: RankConfig) -> None:
        """Shows that the thread of a rank's lanes moves."""
        self._words[_index(ranks.rank, _Word.LANES_BEAT)] += 1

    def beats(self) -> list[int]:
        """Returns the beats of the followers' loops, by rank from 1, then those of their lanes' threads."""
        return self._of_followers(_Word.BEAT) + self._of_followers(_Word.LANES_BEAT)

    def pulse(self, ranks: RankConfig) -> None:
        """Shows that a rank's process runs, although its loop may be busy."""
        self._words[_index(ranks.rank, _Word.PULSE)] += 1

    def pulses(self) -> list[int]:
        """Returns the pulses of the followers, by rank from 1."""
        return self._of_followers(_Word.PULSE)

    def complete_forward(self, ranks: RankConfig, number: int) -> None:
        """Posts the number of the last forward pass that the rank's device has completed."""
        self._words[_index(ranks.rank, _Word.COMPLETED_FORWARD)] = number

    def completed_forward(self) -> int:
        """Returns the last forward pass that all followers have completed."""
        return min(self._of_followers(_Word.COMPLETED_FORWARD))

    def end_load(self, ranks: RankConfig, order: int, *, has_failed: bool) -> None:
        """Posts the number of the last order to load an adapter that the rank has tried."""
        if has_failed:
            self._words[_index(ranks.rank, _Word.FAILED_LOAD)] = order
        self._words[_index(ranks.rank, _Word.ENDED_LOAD)] = order

    def ended_load(self) -> int:
        """Returns the last order that all followers have tried."""
        return min(self._of_followers(_Word.ENDED_LOAD))

    def failed_load(self) -> int:
        """Returns the last order that a follower has failed to load; 0: none."""
        return max(self._of_followers(_Word.FAILED_LOAD))

    def abort(self) -> None:
        """Releases operations that wait for other ranks. All ranks must end."""
        self._words[_Order.ABORT] = 1

    @property
    def is_aborted(self) -> bool:
        return bool(self._words[_Order.ABORT])

    @property
    def abort_address(self) -> int:
        """Address of the word that `abort` sets, for devices. Any value but 0 aborts."""
        return addressof(c_int64.from_buffer(self._words, _Order.ABORT * _WORD_BYTES))

    def stop(self) -> None:
        """Asks the followers to end after the records and commands published so far."""
        self._words[_Order.STOP] = 1

    @property
    def is_stopping(self) -> bool:
        return bool(self._words[_Order.STOP])

    def _of_followers(self, word: _Word) -> list[int]:
        return [self._words[_index(rank, word)] for rank in range(1, self.degree)]


def _index(rank: int, word: _Word) -> int:
    return (1 + rank) * _WORDS_PER_LINE + word
