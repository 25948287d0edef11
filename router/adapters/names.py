"""The names of adapters, as this router knows them."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.adapters import AdapterBook, AdapterEntry, AdapterRef


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a request names.

    Attributes:
        name: name in answers.
        adapter: content of the adapter when the request came; None: the base model.
    """

    name: str
    adapter: AdapterRef | None = None

    @property
    def content_hash(self) -> str:
        return self.adapter.content_hash if self.adapter is not None else ""


# Of requests that no frontend made.
BASE_MODEL = ServedModel("")


class AdapterNames:
    """The router's book, which routers and workers keep equal.

    A restarted router begins with the names of the command line, and learns the others from workers and routers before
    it serves.

    Attributes:
        is_complete: whether a worker or another router has told its names.
    """

    def __init__(
        self, origin: str, static: Iterable[AdapterEntry] = (), now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Args: origin: unique name of this router. static: of the command line, earlier than all changes."""
        self._origin = origin
        self._now_ns = now_ns
        self._book = AdapterBook()
        self._book.merge(static)
        self._num_ended: Counter[tuple[str, str]] = Counter()
        self._on_news: list[Callable[[Sequence[AdapterEntry]], None]] = []
        self.is_complete = False

    def subscribe(self, on_news: Callable[[Sequence[AdapterEntry]], None]) -> None:
        """Calls `on_news` with each entry that is news to this router."""
        self._on_news.append(on_news)

    def find(self, name: str) -> AdapterRef | None:
        return self._book.find(name)

    def loaded(self) -> list[AdapterEntry]:
        return self._book.loaded()

    def entries(self) -> tuple[AdapterEntry, ...]:
        return self._book.entries()

    def merge(self, entries: Sequence[AdapterEntry]) -> None:
        """Takes the names of a worker or another router."""
        self.is_complete = True
        self._tell(self._book.merge(entries))

    def change(self, name: str, adapter: AdapterRef | None) -> None:
        """Loads a name, or unloads it."""
        self._tell([self._book.change(name, adapter, self._origin, self._now_ns())])

    def count_ended(self, name: str, outcome: str) -> None:
        if self.find(name) is not None:
            self._num_ended[name, outcome] += 1

    @property
    def num_ended(self) -> Counter[tuple[str, str]]:
        """Ended requests of each loaded adapter, by name and outcome, since the name's last load."""
        return self._num_ended

    def _tell(self, news: Sequence[AdapterEntry]) -> None:
        if not news:
            return
        # Names come and go, and metrics must not grow with them.
        unloaded = {entry.name for entry in news if entry.adapter is None}
        for name, outcome in [key for key in self._num_ended if key[0] in unloaded]:
            del self._num_ended[name, outcome]
        for tell in self._on_news:
            tell(news)
