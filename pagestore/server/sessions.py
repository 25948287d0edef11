"""Sessions with workers, and what they use of the region."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tandem.pagestore.server.running_find import RunningFind

# Closed sessions whose process one poll asks for.
MAX_ASKED = 16


@dataclass(slots=True, eq=False)
class Session:
    """One stream of a worker. After its end the worker's copies may still run: its slots and pins stay until `is_gone`.

    Attributes:
        attempt: of its StoreHello.
        writing: generations of the slots that the worker writes, by slot.
        for_peer: of the store of another node, not of a worker.
        finds: by number.
    """

    name: str
    incarnation: str
    is_gone: Callable[[], bool]
    attempt: int = 0
    for_peer: bool = False
    writing: dict[int, int] = field(default_factory=dict)
    finds: dict[int, RunningFind] = field(default_factory=dict)

    @property
    def uses_slots(self) -> bool:
        return bool(self.writing) or any(find.slots for find in self.finds.values())


class Sessions:
    """Open sessions by name, and closed ones whose copies may still run."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._closed: deque[Session] = deque()

    def __iter__(self) -> Iterator[Session]:
        yield from self._open.values()
        yield from self._closed

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_closed(self) -> int:
        return len(self._closed)

    def open(self, name: str, incarnation: str, is_gone: Callable[[], bool], attempt: int = 0) -> Session:
        """Raises ValueError if the name is in use."""
        if name in self._open:
            raise ValueError(f"session {name} is open already")
        self._open[name] = Session(name, incarnation, is_gone, attempt)
        return self._open[name]

    def get(self, name: str) -> Session:
        """Raises ValueError if no session of the name is open."""
        if name not in self._open:
            raise ValueError(f"no session {name} is open")
        return self._open[name]

    def close(self, name: str) -> Session | None:
        """Returns the session, whose finds the caller stops; None if it is not open."""
        session = self._open.pop(name, None)
        if session is not None:
            self._closed.append(session)
        return session

    def names_of(self, incarnation: str) -> list[str]:
        """Returns the names of the open sessions of a worker's life."""
        return [session.name for session in self._open.values() if session.incarnation == incarnation]

    def last_attempt(self, incarnation: str) -> int:
        """Returns the last attempt of the sessions of a worker's life whose copies may run; 0 without one."""
        return max((session.attempt for session in self if session.incarnation == incarnation), default=0)

    def take_closed(self, incarnation: str) -> list[Session]:
        """Removes the closed sessions of a worker's life, whose copies have ended."""
        taken = [session for session in self._closed if session.incarnation == incarnation]
        if taken:
            self._closed = deque(session for session in self._closed if session.incarnation != incarnation)
        return taken

    def take_settled(self) -> list[Session]:
        """Removes closed sessions that use no slots or whose process is gone. Looks at a bounded number, in turns."""
        settled = []
        for _ in range(min(len(self._closed), MAX_ASKED)):
            session = self._closed.popleft()
            if not session.uses_slots or session.is_gone():
                settled.append(session)
            else:
                self._closed.append(session)
        return settled
