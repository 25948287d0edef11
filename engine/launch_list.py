"""Every forward that one engine has been given, until what it gave has been taken."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import Completion
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.token_sequence import TokenSequence


class ForwardPart(ABC):
    """What a forward computes of one kind: tokens of sequences that are decoded, or of prompts.

    Attributes:
        sequences: in the order of the batch.
        feed: where the forward finds tokens of these that are not known on the host; None if they all are. It is there
            from `begin` on.
    """

    sequences: Sequence[TokenSequence]
    feed: Feed | None = None

    @abstractmethod
    def begin(self) -> None:
        """The forward is about to be launched: asks each sequence for the tokens that it computes."""

    @abstractmethod
    def launched(self, output: ForwardOutput, batch: Batch) -> None:
        """It has been launched. From here on the sequences are as they will be when it is done.

        Args:
            output: of all parts, in the order of the batch.
        """

    @abstractmethod
    def end(self) -> None:
        """Waits for the forward, and passes on what it gave for these. Called once, when it is no longer in the list:
        nothing of it runs any more."""


@dataclass(eq=False, slots=True)
class _Launch:
    """
    Attributes:
        parts: those that are decoded before prompts.
        written: the pages of prompts that it writes.
    """

    output: ForwardOutput
    parts: Sequence[ForwardPart]
    written: frozenset[int]

    def uses(self, table_id: int) -> bool:
        return any(s.table_id == table_id for part in self.parts for s in part.sequences)


class LaunchList:
    """The one list in which a forward of an engine that serves stands from its launch on, whoever launched it. Who
    gives pages back, or away, asks here whether a forward may still touch them; forwards end in the order of their
    launch."""

    def __init__(self, page_size: int) -> None:
        """Args: page_size: tokens of a page."""
        self._page_size = page_size
        self._launches: deque[_Launch] = deque()

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, output: ForwardOutput, decoded: ForwardPart | None, prompts: ForwardPart | None) -> None:
        """Notes a forward that has just been launched: before its parts are told, so that nobody takes what it writes
        for there."""
        parts = [part for part in (decoded, prompts) if part is not None]
        # Nobody else has the page that a token which is decoded goes to before it is known.
        sequences = () if prompts is None else prompts.sequences
        size = self._page_size
        pages = [s.page_ids[s.cached_len // size : -(-s.device_len // size)] for s in sequences]
        self._launches.append(_Launch(output, parts, frozenset(chain.from_iterable(pages))))

    @property
    def parts(self) -> list[ForwardPart]:
        """Those of all forwards whose results have not been taken, in the order of their launch."""
        return [part for launch in self._launches for part in launch.parts]

    @property
    def is_oldest_done(self) -> bool:
        """Whether there is one, and it has completed."""
        return bool(self._launches) and self._launches[0].output.done()

    def collect_oldest(self) -> None:
        """Waits for the forward that was launched first, and has what it gave passed on."""
        for part in self._launches.popleft().parts:
            part.end()

    def collect_all_but(self, num_left: int) -> None:
        """Likewise, one after the other until so many are left."""
        while len(self._launches) > num_left:
            self.collect_oldest()

    def using(self, table_id: int) -> list[Completion]:
        """Returns the forwards that may still run and were launched with this page table (`PageHandle.table_id`)."""
        return [launch.output for launch in self._launches if not launch.output.done() and launch.uses(table_id)]

    def num_ready(self, page_ids: Sequence[int]) -> int:
        """How many of these pages, from the first one on, no forward is still writing a prompt into, whoever launched
        it: they may leave this device."""
        running = [launch.written for launch in self._launches if not launch.output.done()]
        # Most forwards write none of them, which is found out without a look at each here.
        unready = [written for written in running if not written.isdisjoint(page_ids)]
        if not unready:
            return len(page_ids)
        return next(number for number, page_id in enumerate(page_ids) if any(page_id in pages for pages in unready))
