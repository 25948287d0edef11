"""A request in hand. The objects of one request at the router:

| object | content | owner |
|---|---|---|
| `RequestSpec` | the client's request; never changes | the tracker |
| `Generation` | one output on its way to a client | a frontend's call |
| `OutputText` | text of that output | the Generation |
| `RequestTracker` | state machine: attempt, tokens in order, end | the Generation |
| `ActiveRequest` | workers and deadlines | the Router |
| `TokenQueue` | tokens not yet taken by the Generation | the ActiveRequest |
| `RoutingRequest` | a snapshot | the routing policy |

An HTTP request has one of each per output; its `Answer` owns a `ChoiceBuffer` for each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.messages import Abort
from tandem.router.requests.token_queue import TokenQueue
from tandem.router.requests.tracker import RequestTracker
from tandem.router.workers.worker import Pair, Worker

# Lost workers in a row that make a request a suspect.
SUSPECT_AFTER = 2
# Tokens that a lost worker may have computed but not reported.
NUM_UNHEARD_TOKENS = 8


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """Times are on the router's clock.

    Attributes:
        number: order of arrival.
        pair: workers of the current attempt, equal for a prompt that is only embedded; None between attempts.
        workers: members of the pair that still have a part; losing one ends the attempt.
        prefill_has_part: True until the attempt's decode worker sends a token.
        decode_deadline: limit for the decode worker to report whether it has the pages of a lost prefill worker.
        on_overdue: called if the client does not take its output.
        is_given: True once the client's side has asked for everything.
        num_failures: failed attempts, except for lack of pages or the loss of a worker.
        num_links_lost: attempts that ended with their link while both workers may live.
        waiting_since: start of its wait for a worker; None: it does not wait.
        num_losses, num_excused: workers lost, or out of reach, in its current place.
        cleared_len: number of output tokens that ends that place.
        may_move_at: earliest time of its next move.
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
    waiting_since: float | None = None
    waiting_bytes: int = 0
    waiting_tokens: int = 0
    num_losses: int = 0
    num_excused: int = 0
    lost_on: set[str] = field(default_factory=set)
    cleared_len: int = 0
    may_move_at: float = 0.0
    _num_pending_tokens: int = 0
    _num_kv_tokens: int = 0
    _num_arriving_tokens: int = 0
    _is_decoding: bool = False
    _is_starting: bool = False
    _is_under_test: bool = False

    @property
    def is_suspect(self) -> bool:
        """True if it may be crashing workers."""
        return self.num_losses >= SUSPECT_AFTER

    def assign_pair(self, pair: Pair) -> None:
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
        self._num_pending_tokens = num_tokens if pair.estimate is None else pair.estimate.num_to_compute
        pair.prefill.add_load(1, num_pending_tokens=self._num_pending_tokens)
        if self.tracker.embeds:
            return
        self._is_decoding = True
        self._count_handover(1)
        self._num_kv_tokens = self._num_arriving_tokens = num_tokens
        if pair.estimate is not None and pair.estimate.num_to_store is not None:
            self._num_arriving_tokens = pair.estimate.num_to_store
        pair.decode.add_load(
            int(pair.decode is not pair.prefill),
            num_decoding=1,
            num_kv_tokens=num_tokens,
            num_arriving_tokens=self._num_arriving_tokens,
        )

    def prefill_is_computed(self) -> None:
        if self.pair is not None and self._num_pending_tokens:
            self.pair.prefill.add_load(num_pending_tokens=-self._num_pending_tokens)
            self._num_pending_tokens = 0

    def prefill_is_over(self) -> None:
        self.prefill_has_part = False
        self.decode_deadline = None
        self.prefill_is_computed()
        self._end_start()
        if self.pair is not None and self.pair.prefill is not self.pair.decode:
            self._release_worker(self.pair.prefill)

    def release_pair(self, *, tell_workers: bool) -> None:
        """Ends the attempt and its loads. Args: tell_workers: True to send Abort."""
        self.prefill_is_computed()
        self._end_start()
        self.decode_deadline = None
        if tell_workers and self.pair is not None:
            # The prefill worker may not know that its part is over.
            for worker in dict.fromkeys((self.pair.prefill, self.pair.decode)):
                worker.send([Abort(self.tracker.request_id, self.tracker.attempt)])
        for worker in list(self.workers):
            self._release_worker(worker)
        if self.pair is not None and self._is_decoding:
            self._is_decoding = False
            self.pair.decode.add_load(num_decoding=-1, num_kv_tokens=-self._num_kv_tokens)
        self.pair = None

    def charge_loss(self, worker_id: str) -> None:
        self.num_losses += 1
        self.lost_on.add(worker_id)
        self.cleared_len = len(self.tracker.output_ids) + NUM_UNHEARD_TOKENS

    def excuse_loss(self, at_most: int) -> bool:
        """Returns whether the loss of an unreachable worker is excused."""
        self.num_excused += 1
        self.cleared_len = max(self.cleared_len, len(self.tracker.output_ids) + NUM_UNHEARD_TOKENS)
        return self.num_excused <= at_most

    def clear_losses(self) -> None:
        """The request got past its place, so it did not cause the losses."""
        self.num_losses = self.num_excused = 0
        self.lost_on.clear()
        for worker in self.workers:
            worker.num_suspects -= self._is_under_test
        self._is_under_test = False

    def _count_handover(self, difference: int) -> None:
        if self.pair is not None and self._is_decoding and self.pair.prefill is not self.pair.decode:
            self.pair.prefill.handing_over[self.pair.decode.worker_id] += difference

    def _end_start(self) -> None:
        if self._is_starting:
            self._count_handover(-1)
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
