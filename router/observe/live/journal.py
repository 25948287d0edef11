"""Recent events of a cluster, as one router saw them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from tandem.messages import Hello, LinkState
from tandem.router.workers.worker import Worker

MAX_ENTRIES = 200
# Seconds within which equal events merge: a worker's end affects many requests.
MERGE_S = 2.0
MERGE_AMONG = 4

EntryKind = Literal["router", "worker", "link", "requests"]


@dataclass(eq=False, slots=True)
class Entry:
    """
    Attributes:
        version: version of the journal at the entry's last change.
        at_s: seconds since the epoch.
        count: number of merged events.
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
    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._num_entries = 0
        self.version = 0

    def started(self, router_id: str, num_restarts: int) -> None:
        self._note("router", router_id, _times("started", num_restarts), is_fault=num_restarts > 0)

    def router_seen(self, router_id: str, *, alive: bool) -> None:
        self._note("router", router_id, "answers" if alive else "does not answer", is_fault=not alive)

    def worker_joined(self, hello: Hello) -> None:
        self._note("worker", hello.worker_id, _times("joined", hello.num_restarts))

    def worker_lost(self, worker_id: str, kind: str, reason: str) -> None:
        self._note("worker", worker_id, f"lost, {kind}: {reason}", is_fault=True)

    def worker_left(self, worker_id: str) -> None:
        self._note("worker", worker_id, "left: no longer planned")

    def link_changed(self, worker: Worker, state: LinkState) -> None:
        """Call before the worker's record of its links changes: a link's first opening is not noted."""
        subject = f"{worker.worker_id} to {state.decode_worker_id}"
        if not state.up:
            self._note("link", subject, f"down: {state.reason}" if state.reason else "down", is_fault=True)
        elif state.decode_worker_id in worker.links_down:
            self._note("link", subject, "up again")

    def attempt_restarted(self, kind: str) -> None:
        self._note("requests", "requests", f"restarted: {kind.replace('_', ' ')}")

    def since(self, version: int) -> Iterator[Entry]:
        """Returns entries noted or changed after `version`, oldest first."""
        return (entry for entry in self._entries if entry.version > version)

    def _note(self, kind: EntryKind, subject: str, text: str, *, is_fault: bool = False) -> None:
        self.version += 1
        now = self._now()
        # A worker's end affects links and requests in turn; events of one worker stay in order.
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
