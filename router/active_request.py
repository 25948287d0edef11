"""A request in hand.

The objects of one request at the router, and who owns them:

| object | what it is | owner |
|---|---|---|
| `Generation` | one output on its way to a client: its pieces, its end, what is counted of it | a frontend's call |
| `OutputText` | the text of that output, up to a stop string | the Generation |
| `RequestTracker` | the state machine: which attempt counts, the tokens in order, the one end | the Generation |
| `ActiveRequest` | who serves the tracker's request, and until when, while it is being served | the Router |
| `TokenQueue` | tokens that have come and that the Generation has not asked for | the ActiveRequest |
| `RoutingRequest` | how the request stood at one moment | the routing policy, which is given it |

Several outputs of one HTTP request are as many of each; what of an output waits to be written as JSON is in a
`ChoiceBuffer`, which the `Answer` to the HTTP request owns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from router.token_queue import TokenQueue
from router.tracker import RequestTracker
from router.worker_registry import Pair, Worker
from tandem.messages import Abort


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """What the router must know of a request beside its tracker, as long as it serves it. The Router owns it.

    Attributes:
        deadline: on the router's clock, for the whole request.
        tokens: what its client reads.
        pair: who serves the current attempt; None between attempts.
        workers: those of them that have a part left: what is lost with them is lost to the attempt.
        prefill_has_part: whether the decode worker has not spoken yet in the current attempt.
        decode_deadline: until when the decode worker may say whether it has the pages, if the prefill worker died
            after the first token; None otherwise.
        last_token_at: on the router's clock, when tokens last came.
        on_overdue: called if the client does not take what is ready for it.
        final_since: on the router's clock, since when nothing more comes.
        is_given: whether the client's side has asked for all that came.
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
    _num_pending_tokens: int = 0

    def assign_pair(self, pair: Pair) -> None:
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
            self._release_worker(self.pair.prefill)

    def release_pair(self, *, tell_workers: bool) -> None:
        """The attempt is over, and counts no more in anybody's load; its workers are told so, by name, unless they
        know."""
        self.prefill_is_computed()
        self.decode_deadline = None
        if tell_workers and self.pair is not None:
            # The prefill worker is told even if its part is over: it may not know yet.
            for worker in dict.fromkeys((self.pair.prefill, self.pair.decode)):
                worker.send([Abort(self.tracker.request_id, self.tracker.attempt)])
        for worker in list(self.workers):
            self._release_worker(worker)
        self.pair = None

    def _release_worker(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            worker.num_assigned -= 1
