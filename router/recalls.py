"""What workers remember of a request that this router, or another one, has served (worker/records.py)."""

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

# A worker that has stopped holds nobody up for longer.
RECALL_TIMEOUT_S = 2.0
# An answer may be as long as the model's length: no more are on their way at once. Where a router has died, many ask at
# the same time: they wait for their turn.
MAX_RECALLS = 32
WAIT_TIMEOUT_S = 10.0
# Workers connect to a router that has started within a fraction of this.
SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class RecallResult:
    """What workers have said.

    Attributes:
        record: of the highest attempt the longest; None: nobody has one.
        is_certain: whether all have answered that may have one.
    """

    record: Recalled | None
    is_certain: bool


@dataclass(eq=False, slots=True)
class _Pending:
    """Attributes: asked: those who have not answered; done: set when there are none."""

    asked: set[Worker]
    answers: list[Recalled] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Recalls:
    """The recalls under way. Belongs to the router's loop."""

    def __init__(self, workers: WorkerRegistry, incarnation: str, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._incarnation = incarnation
        self._clock = clock
        self._settled_at = clock() + SETTLE_S
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(MAX_RECALLS)
        self._pending: dict[str, _Pending] = {}

    async def recall(self, record_id: str) -> RecallResult:
        """Asks all workers, of every role: the one with the longest record may be gone. Returns RECALL_TIMEOUT_S after
        its turn has come at the latest.

        Raises:
            OverloadedError: its turn has not come within WAIT_TIMEOUT_S.
        """
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
        """A worker's answer, which may come when nobody waits for it any more."""
        if (pending := self._pending.get(answer.recall_id)) is not None and worker in pending.asked:
            pending.answers.append(answer)
            self._strike_off(pending, worker)

    def lose_worker(self, worker: Worker) -> None:
        """Nothing comes from this one any more, and its records are gone."""
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
