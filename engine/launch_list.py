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
    """The decoded sequences of a forward pass, or its prompts.

    Attributes:
        feed: source of the tokens that the host does not know, set by `begin`; None if it knows all.
    """

    sequences: Sequence[TokenSequence]
    feed: Feed | None = None

    @abstractmethod
    def begin(self) -> None:
        """Extends each sequence by the tokens to compute, just before the launch."""

    @abstractmethod
    def launched(self, output: ForwardOutput, batch: Batch) -> None:
        """Called after the launch. The sequences are now in their state after the forward pass.

        Args:
            output: of all parts, in the order of the batch.
        """

    @abstractmethod
    def end(self) -> None:
        """Waits for the forward pass and passes on its results. Called once."""


@dataclass(eq=False, slots=True)
class _Launch:
    """
    Attributes:
        written: pages into which it writes prompts.
    """

    output: ForwardOutput
    parts: Sequence[ForwardPart]
    written: frozenset[int]

    def uses(self, table_id: int) -> bool:
        return any(s.table_id == table_id for part in self.parts for s in part.sequences)


class LaunchList:
    """Forward passes in launch order, until collected.

    A collected forward pass may still run on other ranks of the worker. It uses its pages until it is done on all.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._launches: deque[_Launch] = deque()
        self._collected: deque[_Launch] = deque()
        self._has_lagged = False

    def __len__(self) -> int:
        return len(self._launches)

    def add(self, output: ForwardOutput, decoded: ForwardPart | None, prompts: ForwardPart | None) -> None:
        """Adds a forward pass before its parts learn of the launch: its pages must never seem complete."""
        parts = [part for part in (decoded, prompts) if part is not None]
        # Only prompts: no other request sees a decoded token's page before the token is known.
        sequences = () if prompts is None else prompts.sequences
        size = self._page_size
        pages = [s.page_ids[s.cached_len // size : -(-s.device_len // size)] for s in sequences]
        self._launches.append(_Launch(output, parts, frozenset(chain.from_iterable(pages))))

    @property
    def parts(self) -> list[ForwardPart]:
        return [part for launch in self._launches for part in launch.parts]

    @property
    def is_oldest_done(self) -> bool:
        return bool(self._launches) and self._launches[0].output.done()

    @property
    def is_lagging(self) -> bool:
        """True while a collected forward pass runs on other ranks, which send no event when it is done. True once more
        after its end: a caller must not sleep before it has freed the pages."""
        self._drop_done()
        has_lagged, self._has_lagged = self._has_lagged, bool(self._collected)
        return has_lagged or self._has_lagged

    def collect_oldest(self) -> None:
        launch = self._launches.popleft()
        # First, because its parts release pages when they end.
        self._collected.append(launch)
        for part in launch.parts:
            part.end()
        self._drop_done()
        self._has_lagged = self._has_lagged or bool(self._collected)

    def collect_all_but(self, num_left: int) -> None:
        while len(self._launches) > num_left:
            self.collect_oldest()

    def using(self, table_id: int) -> list[Completion]:
        """Unfinished forward passes launched with this page table."""
        return [launch.output for launch in self._running() if launch.uses(table_id)]

    def num_ready(self, page_ids: Sequence[int]) -> int:
        """Length of the prefix of these pages that no running forward pass writes a prompt into."""
        running = [launch.written for launch in self._running()]
        # Most forward passes write none of these pages.
        unready = [written for written in running if not written.isdisjoint(page_ids)]
        if not unready:
            return len(page_ids)
        return next(number for number, page_id in enumerate(page_ids) if any(page_id in pages for pages in unready))

    def _running(self) -> list[_Launch]:
        self._drop_done()
        return [launch for launch in chain(self._collected, self._launches) if not launch.output.done()]

    def _drop_done(self) -> None:
        # Every rank completes forward passes in launch order.
        while self._collected and self._collected[0].output.done():
            self._collected.popleft()
