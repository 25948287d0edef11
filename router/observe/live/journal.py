"""What has befallen a cluster lately, as one router saw it: for whoever asks why numbers look as they do."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tandem.messages import Hello, LinkState
from tandem.router.workers.worker import Worker

# The oldest are forgotten first.
MAX_ENTRIES = 200
# A worker's end befalls many requests: what is alike within so short a time is one entry.
MERGE_S = 2.0
MERGE_AMONG = 4

EntryKind = Literal["router", "worker", "link", "requests"]


@dataclass(eq=False, slots=True)
class Entry:
    """
    Attributes:
        number: later entries have larger ones.
        version: of the journal, when the entry last changed.
        at_s: seconds since the epoch.
        subject: whom it befell.
        is_fault: whether it is bad news.
        count: how often it has happened.
    """

    number: int
    version: int
    at_s: float
    kind: EntryKind
    subject: str
    text: str
    is_fault: bool
    count: int = 1


class Journal:
    """The latest entries. Belongs to one loop.

    Attributes:
        version: grows with each change.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """Args: now: seconds since the epoch."""
        self._now = now
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._num_entries = 0
        self.version = 0

    def started(self, router_id: str, num_restarts: int) -> None:
        """The router itself."""
        self._note("router", router_id, _times("started", num_restarts), is_fault=num_restarts > 0)

    def router_seen(self, router_id: str, *, alive: bool) -> None:
        """Another router answers, or does so no more."""
        self._note("router", router_id, "answers" if alive else "does not answer", is_fault=not alive)

    def worker_joined(self, hello: Hello) -> None:
        self._note("worker", hello.worker_id, _times("joined", hello.num_restarts))

    def worker_lost(self, worker_id: str, kind: str, reason: str) -> None:
        self._note("worker", worker_id, f"lost, {kind}: {reason}", is_fault=True)

    def worker_left(self, worker_id: str) -> None:
        self._note("worker", worker_id, "left: the cluster needs it no more")

    def link_changed(self, worker: Worker, state: LinkState) -> None:
        """To be called before the worker's own notes of its links change: those that open first are no news."""
        subject = f"{worker.worker_id} to {state.decode_worker_id}"
        if not state.up:
            self._note("link", subject, f"down: {state.reason}" if state.reason else "down", is_fault=True)
        elif state.decode_worker_id in worker.links_down:
            self._note("link", subject, "up again")

    def attempt_restarted(self, kind: str) -> None:
        """A request begins another attempt."""
        self._note("requests", "requests", f"begun again: {kind.replace('_', ' ')}")

    def since(self, version: int) -> Iterator[Entry]:
        """What was noted or has changed since the journal had this version, the oldest first."""
        return (entry for entry in self._entries if entry.version > version)

    def _note(self, kind: EntryKind, subject: str, text: str, *, is_fault: bool = False) -> None:
        self.version += 1
        now = self._now()
        # The end of a worker befalls its links and its requests in turn; what befalls one worker has an order.
        num_looked_at = MERGE_AMONG if kind == "requests" else 1
        for last in islice(reversed(self._entries), num_looked_at):
            if (last.kind, last.subject, last.text) == (kind, subject, text) and now - last.at_s < MERGE_S:
                last.count += 1
                last.version = self.version
                return
        self._num_entries += 1
        self._entries.append(Entry(self._num_entries, self.version, now, kind, subject, text, is_fault))


def _times(done: str, num_restarts: int) -> str:
    if not num_restarts:
        return done
    return f"{done}, restart {num_restarts}"
