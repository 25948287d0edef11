"""A request in hand: its tracker, the workers that serve it now, and the queue its client reads."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from router.tracker import RequestTracker
from router.worker_registry import Pair, Worker
from tandem.messages import Abort


class TokenQueue:
    """Tokens on their way to one client. What comes while the client is not reading goes out together."""

    __slots__ = ("_ended", "_token_ids", "_waiter")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self._wake()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._wake()

    async def get(self) -> list[int] | None:
        """All tokens that have come since the last call, at least one; None once there will be no more."""
        while not self._token_ids and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take() or None

    def take(self) -> list[int]:
        """All tokens that have come since the last call, perhaps none."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    @property
    def ended(self) -> bool:
        return self._ended and not self._token_ids

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None


@dataclass(eq=False, slots=True)
class RequestStream:
    """
    Attributes:
        tokens: what the client reads.
        pair: who serves the current attempt; None between attempts.
        workers: those of them that have a part left: what is lost with them is lost to the attempt.
        prefill_has_part: whether the decode worker has not spoken yet in the current attempt.
        decode_deadline: until when the decode worker may say whether it has the pages, if the prefill worker died
            after the first token; None otherwise.
        last_token_at: on the router's clock, when tokens last came.
        on_overdue: called if the client does not take what is ready for it.
        final_since: on the router's clock, since when nothing more comes.
        is_given: whether the client's side has asked for all that came.
        deadline: on the router's clock, for the whole request; timed_out says that it has passed.
        num_failures: attempts that failed; those given back for want of pages did not.
    """

    tracker: RequestTracker
    deadline: float
    tokens: TokenQueue = field(default_factory=TokenQueue)
    pair: Pair | None = None
    workers: list[Worker] = field(default_factory=list)
    prefill_has_part: bool = False
    decode_deadline: float | None = None
    last_token_at: float | None = None
    on_overdue: Callable[[], None] | None = None
    final_since: float | None = None
    is_given: bool = False
    num_failures: int = 0
    timed_out: bool = False
    _num_pending_tokens: int = 0

    def assign(self, pair: Pair) -> None:
        """An attempt begins; both workers' loads count it from now on."""
        assert self.pair is None
        self.pair = pair
        self.prefill_has_part = True
        self.workers = [pair.prefill] if pair.prefill is pair.decode else [pair.prefill, pair.decode]
        for worker in self.workers:
            worker.num_assigned += 1
        self._num_pending_tokens = len(self.tracker.prompt_ids) + len(self.tracker.output_ids)
        pair.prefill.num_pending_tokens += self._num_pending_tokens

    def prefill_is_computed(self) -> None:
        """The first token is there: the prefill worker has nothing left to compute."""
        if self.pair is not None:
            self.pair.prefill.num_pending_tokens -= self._num_pending_tokens
            self._num_pending_tokens = 0

    def prefill_is_over(self) -> None:
        """The decode worker has the pages: the prefill worker has no part in the attempt any more."""
        self.prefill_has_part = False
        self.decode_deadline = None
        self.prefill_is_computed()
        if self.pair is not None and self.pair.prefill is not self.pair.decode:
            self._leave(self.pair.prefill)

    def end_attempt(self, *, tell_workers: bool) -> None:
        """The attempt is over; its workers are told so, by name, unless they know."""
        self.prefill_is_computed()
        self.decode_deadline = None
        if tell_workers and self.pair is not None:
            # The prefill worker too if its part is over: it may not know yet.
            for worker in dict.fromkeys((self.pair.prefill, self.pair.decode)):
                worker.send([Abort(self.tracker.request_id, self.tracker.attempt)])
        for worker in list(self.workers):
            self._leave(worker)
        self.pair = None

    def _leave(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            worker.num_assigned -= 1
