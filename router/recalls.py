"""Lookup of the workers' records of requests (docs/requests.md, "Resumed streams")."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.messages import Recall, Recalled
from tandem.request_ids import make_request_id
from tandem.router.errors import OverloadedError
from tandem.router.workers.worker import Worker
from tandem.router.workers.worker_registry import WorkerRegistry

# Limit on the wait for a stopped worker.
RECALL_TIMEOUT_S = 2.0
# Limit on concurrent lookups: an answer may be as long as the model's length, and many clients ask after a router's
# death.
MAX_RECALLS = 32
WAIT_TIMEOUT_S = 10.0
# Workers connect to a new router in a fraction of this.
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class RecallResult:
    """
    Attributes:
        record: the longest record of the highest attempt; None: no worker has one.
        is_certain: True if every worker that may have a record has answered.
    """

    record: Recalled | None
    is_certain: bool


@dataclass(eq=False, slots=True)
class _Pending:
    """Attributes: asked: workers that have not answered; done: set when there are none."""

    asked: set[Worker]
    answers: list[Recalled] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Recalls:
    """Belongs to the router's loop."""

    def __init__(self, workers: WorkerRegistry, incarnation: str, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._incarnation = incarnation
        self._clock = clock
        self._settled_at = clock() + SETTLE_S
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(MAX_RECALLS)
        self._pending: dict[str, _Pending] = {}

    async def recall(self, record_id: str) -> RecallResult:
        """Asks the workers of every role, because the one with the longest record may be gone. Raises OverloadedError
        after WAIT_TIMEOUT_S in the queue."""
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._slots.acquire()
        except TimeoutError as error:
            raise OverloadedError("too many streams are being looked up; try again later") from error
        try:
            return await self._ask(record_id)
        finally:
            self._slots.release()

    def receive(self, worker: Worker, answer: Recalled) -> None:
        if (pending := self._pending.get(answer.recall_id)) is not None and worker in pending.asked:
            pending.answers.append(answer)
            self._strike_off(pending, worker)

    def lose_worker(self, worker: Worker) -> None:
        for pending in self._pending.values():
            self._strike_off(pending, worker)

    async def _ask(self, record_id: str) -> RecallResult:
        recall_id = make_request_id(self._incarnation, next(self._numbers))
        workers = list(self._workers)
        pending = self._pending[recall_id] = _Pending(set(workers))
        try:
            for worker in workers:
                worker.send([Recall(recall_id, record_id)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECALL_TIMEOUT_S):
                    if workers:
                        await pending.done.wait()
        finally:
            del self._pending[recall_id]
        found = [answer for answer in pending.answers if answer.resume_token]
        record = max(found, key=lambda answer: (answer.attempt, len(answer.token_ids)), default=None)
        return RecallResult(record, not pending.asked and self._clock() >= self._settled_at)

    def _strike_off(self, pending: _Pending, worker: Worker) -> None:
        pending.asked.discard(worker)
        if not pending.asked:
            pending.done.set()
