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
# Seconds before and after a worker's loss in which it explains faults of its links and ends of attempts.
LOSS_S = 5.0

# The other reasons are a lack of memory.
ENDED_BY_LOSS = ("restarted: worker lost", "restarted: lease lost", "restarted: prefill failed")
# Joins the two ends of a link in an entry's subject.
LINK = " to "

EntryKind = Literal["router", "worker", "link", "requests"]


@dataclass(eq=False, slots=True)
class Entry:
    """
    Attributes:
        version: version of the journal at the entry's last change.
        at_s: seconds since the epoch.
        count: number of merged events.
        loss: number of the entry of the worker's loss that explains this one, itself included; 0 without one.
    """

    number: int
    version: int
    at_s: float
    kind: EntryKind
    subject: str
    text: str
    is_fault: bool
    count: int = 1
    loss: int = 0


class Journal:
    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._num_entries = 0
        self._last_lost: Entry | None = None
        self.version = 0

    def started(self, router_id: str, num_restarts: int) -> None:
        self._note("router", router_id, _times("started", num_restarts), is_fault=num_restarts > 0)

    def router_seen(self, router_id: str, *, alive: bool) -> None:
        self._note("router", router_id, "answers" if alive else "does not answer", is_fault=not alive)

    def worker_joined(self, hello: Hello) -> None:
        worker_id = hello.worker_id
        self._note("worker", worker_id, _times("joined", hello.num_restarts), loss=self._loss_of(worker_id))

    def worker_lost(self, worker_id: str, kind: str, reason: str) -> None:
        lost = self._note("worker", worker_id, f"lost, {kind}: {reason}", is_fault=True)
        lost.loss = lost.number
        self._last_lost = lost
        # A link's other end may notice the loss first.
        for entry in reversed(self._entries):
            if lost.at_s - entry.at_s > LOSS_S:
                break
            is_of_link = entry.kind == "link" and entry.is_fault and worker_id in entry.subject.split(LINK)
            if not entry.loss and (is_of_link or entry.text in ENDED_BY_LOSS):
                entry.loss, entry.version = lost.number, self.version

    def worker_left(self, worker_id: str) -> None:
        self._note("worker", worker_id, "left: no longer planned")

    def link_changed(self, worker: Worker, state: LinkState) -> None:
        """Call before the worker's record of its links changes: a link's first opening is not noted."""
        subject = f"{worker.worker_id}{LINK}{state.decode_worker_id}"
        if not state.up:
            loss = self._loss_of(worker.worker_id) or self._loss_of(state.decode_worker_id)
            text = f"down: {state.reason}" if state.reason else "down"
            self._note("link", subject, text, is_fault=True, loss=loss)
        elif state.decode_worker_id in worker.links_down:
            last = self._last("link", subject)
            self._note("link", subject, "up again", loss=last.loss if last else 0)

    def attempt_restarted(self, kind: str) -> None:
        text = f"restarted: {kind.replace('_', ' ')}"
        loss = 0
        if text in ENDED_BY_LOSS and self._last_lost is not None and self._now() - self._last_lost.at_s < LOSS_S:
            loss = self._last_lost.number
        self._note("requests", "requests", text, loss=loss)

    def since(self, version: int) -> Iterator[Entry]:
        """Returns entries noted or changed after `version`, oldest first."""
        return (entry for entry in self._entries if entry.version > version)

    def _last(self, kind: EntryKind, subject: str) -> Entry | None:
        return next((e for e in reversed(self._entries) if (e.kind, e.subject) == (kind, subject)), None)

    def _loss_of(self, worker_id: str) -> int:
        """Returns the number of the worker's loss if it has not joined again, else 0."""
        last = self._last("worker", worker_id)
        return last.loss if last is not None and last.is_fault else 0

    def _note(self, kind: EntryKind, subject: str, text: str, *, is_fault: bool = False, loss: int = 0) -> Entry:
        self.version += 1
        now = self._now()
        # A worker's end affects links and requests in turn; events of one worker stay in order.
        num_looked_at = MERGE_AMONG if kind == "requests" else 1
        for last in islice(reversed(self._entries), num_looked_at):
            is_same = (last.kind, last.subject, last.text) == (kind, subject, text)
            if is_same and last.loss in (loss, last.number) and now - last.at_s < MERGE_S:
                last.count += 1
                last.version = self.version
                return last
        self._num_entries += 1
        entry = Entry(self._num_entries, self.version, now, kind, subject, text, is_fault, loss=loss)
        self._entries.append(entry)
        return entry


def _times(done: str, num_restarts: int) -> str:
    if not num_restarts:
        return done
    return f"{done}, restart {num_restarts}"
