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

from tandem.messages import Abort
from tandem.router.requests.token_queue import TokenQueue
from tandem.router.requests.tracker import RequestTracker
from tandem.router.workers.worker import Pair, Worker

# Once so many workers in a row were lost while they served a request, it is a suspect.
SUSPECT_AFTER = 2
# What a worker was computing when it was lost: the router had not heard of these tokens yet.
NUM_UNHEARD_TOKENS = 8


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """What the router must know of a request beside its tracker, as long as it serves it. The Router owns it.

    Attributes:
        deadline: on the router's clock, for the whole request.
        number: requests that came later have a larger one.
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
        num_failures: attempts that failed; those given back for want of pages did not, nor those that ended with a
            worker.
        num_links_lost: attempts that ended with their link, though both workers may live.
        is_queued: whether it waits for its first token.
        waiting_since: on the router's clock, since when it waits for a worker; None while it does not.
        waiting_bytes: what it holds meanwhile.
        num_losses: workers that were lost while they served it, since it last got past the place where it was then.
        num_excused: workers that were out of reach while they served it, since then.
        lost_on: their ids.
        cleared_len: with so many output tokens it is past that place.
    """

    tracker: RequestTracker
    deadline: float
    number: int = 0
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
    num_links_lost: int = 0
    is_queued: bool = False
    waiting_since: float | None = None
    waiting_bytes: int = 0
    num_losses: int = 0
    num_excused: int = 0
    lost_on: set[str] = field(default_factory=set)
    cleared_len: int = 0
    _num_pending_tokens: int = 0
    _num_kv_tokens: int = 0
    _num_arriving_tokens: int = 0
    _is_starting: bool = False
    _is_under_test: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether so many workers were lost with it that it may be what ends them."""
        return self.num_losses >= SUSPECT_AFTER

    def assign_pair(self, pair: Pair) -> None:
        """An attempt begins; both workers' loads count it from now on."""
        assert self.pair is None
        self.pair = pair
        self.prefill_has_part = True
        self.workers = [pair.prefill] if pair.prefill is pair.decode else [pair.prefill, pair.decode]
        self._is_starting = True
        self._is_under_test = self.is_suspect
        for worker in self.workers:
            worker.num_starting += 1
            worker.num_suspects += self._is_under_test
        num_tokens = len(self.tracker.prompt_ids) + len(self.tracker.output_ids)
        self._num_pending_tokens = self._num_kv_tokens = self._num_arriving_tokens = num_tokens
        if pair.estimate is not None:
            self._num_pending_tokens = pair.estimate.num_to_compute
            if pair.estimate.num_to_store is not None:
                self._num_arriving_tokens = pair.estimate.num_to_store
        pair.prefill.add_load(1, num_pending_tokens=self._num_pending_tokens)
        pair.decode.add_load(
            int(pair.decode is not pair.prefill),
            num_decoding=1,
            num_kv_tokens=num_tokens,
            num_arriving_tokens=self._num_arriving_tokens,
        )

    def prefill_is_computed(self) -> None:
        """The first token is there: the prefill worker has nothing left to compute."""
        if self.pair is not None and self._num_pending_tokens:
            self.pair.prefill.add_load(num_pending_tokens=-self._num_pending_tokens)
            self._num_pending_tokens = 0

    def prefill_is_over(self) -> None:
        """The decode worker has the pages: the prefill worker has no part in the attempt any more."""
        self.prefill_has_part = False
        self.decode_deadline = None
        self.prefill_is_computed()
        self._end_start()
        if self.pair is not None and self.pair.prefill is not self.pair.decode:
            self._release_worker(self.pair.prefill)

    def release_pair(self, *, tell_workers: bool) -> None:
        """The attempt is over, and counts no more in anybody's load; its workers are told so, by name, unless they
        know."""
        self.prefill_is_computed()
        self._end_start()
        self.decode_deadline = None
        if tell_workers and self.pair is not None:
            # The prefill worker is told even if its part is over: it may not know yet.
            for worker in dict.fromkeys((self.pair.prefill, self.pair.decode)):
                worker.send([Abort(self.tracker.request_id, self.tracker.attempt)])
        for worker in list(self.workers):
            self._release_worker(worker)
        if self.pair is not None:
            self.pair.decode.add_load(num_decoding=-1, num_kv_tokens=-self._num_kv_tokens)
        self.pair = None

    def charge_loss(self, worker_id: str) -> None:
        """A worker was lost while it served this request, which may be why."""
        self.num_losses += 1
        self.lost_on.add(worker_id)
        self.cleared_len = len(self.tracker.output_ids) + NUM_UNHEARD_TOKENS

    def excuse_loss(self, at_most: int) -> bool:
        """A worker was lost of which nobody knows whether it has ended. Returns whether that is to count as no loss."""
        self.num_excused += 1
        self.cleared_len = max(self.cleared_len, len(self.tracker.output_ids) + NUM_UNHEARD_TOKENS)
        return self.num_excused <= at_most

    def clear_losses(self) -> None:
        """It is past the place where it was when workers were lost: that was not its doing."""
        self.num_losses = self.num_excused = 0
        self.lost_on.clear()
        for worker in self.workers:
            worker.num_suspects -= self._is_under_test
        self._is_under_test = False

    def _end_start(self) -> None:
        """The decode worker has spoken, or the attempt is over; both workers stand in `workers` until then."""
        for worker in self.workers:
            worker.num_starting -= self._is_starting
        self._is_starting = False
        if self.pair is not None and self._num_arriving_tokens:
            self.pair.decode.add_load(num_arriving_tokens=-self._num_arriving_tokens)
            self._num_arriving_tokens = 0

    def _release_worker(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            worker.add_load(-1)
            worker.num_suspects -= self._is_under_test
