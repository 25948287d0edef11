from hypothesis import given
from hypothesis import strategies as st

from tandem.messages import Abort
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.tracker import RequestTracker
from tandem.router.workers.peer_counts import NOTHING
from tandem.router.workers.worker import Estimate, Pair, Worker
from tests.fakes.request_spec import request_spec
from tests.fakes.scripted_worker import hello


class Told:
    def __init__(self, role: str) -> None:
        self.messages: list[object] = []
        self.worker = Worker(hello(role, role), self.messages.extend, lambda _: None, 0.0, 0.0)

    @property
    def load(self) -> tuple[int, int]:
        return self.worker.num_assigned, self.worker.num_pending_tokens


def begun(prefill: Told, decode: Told) -> ActiveRequest:
    tracker = RequestTracker("r", request_spec(output_ids=[4]))
    request = ActiveRequest(tracker, 100.0)
    tracker.begin_attempt("p", "d", 60.0)
    request.assign_pair(Pair(prefill.worker, decode.worker))
    return request


def test_an_attempt_counts_until_it_is_over() -> None:
    prefill, decode = Told("prefill"), Told("decode")
    request = begun(prefill, decode)
    assert (prefill.load, decode.load) == ((1, 4), (1, 0))
    request.prefill_is_computed()
    assert (prefill.load, decode.load) == ((1, 0), (1, 0))
    request.prefill_is_over()
    assert (prefill.load, decode.load) == ((0, 0), (1, 0))
    assert request.workers == [decode.worker] and not request.prefill_has_part
    request.release_pair(tell_workers=False)
    assert (prefill.load, decode.load) == ((0, 0), (0, 0))
    assert request.pair is None and not prefill.messages and not decode.messages


def test_whoever_does_not_know_is_told_of_the_end() -> None:
    prefill, decode = Told("prefill"), Told("decode")
    request = begun(prefill, decode)
    request.prefill_is_over()
    request.release_pair(tell_workers=True)
    assert prefill.messages == decode.messages == [Abort("r", 0)]
    request.release_pair(tell_workers=True)
    assert len(prefill.messages) == len(decode.messages) == 1
    assert (prefill.load, decode.load) == ((0, 0), (0, 0))


def test_a_worker_of_both_roles_counts_once_and_is_told_once() -> None:
    both = Told("both")
    request = begun(both, both)
    assert both.load == (1, 4)
    request.prefill_is_over()
    assert both.load == (1, 0), "it decodes"
    request.release_pair(tell_workers=True)
    assert both.load == (0, 0) and both.messages == [Abort("r", 0)]


def test_what_a_decode_worker_has_not_spoken_of_is_on_its_way_there() -> None:
    prefill, decode = Told("prefill"), Told("decode")
    request = begun(prefill, decode)
    assert decode.worker.num_arriving_tokens == decode.worker.num_kv_tokens == 4
    request.prefill_is_computed()
    assert decode.worker.num_arriving_tokens == 4
    request.prefill_is_over()
    assert (decode.worker.num_arriving_tokens, decode.worker.num_kv_tokens) == (0, 4)
    request.release_pair(tell_workers=False)
    assert (decode.worker.num_arriving_tokens, decode.worker.num_kv_tokens) == (0, 0)
    request.assign_pair(Pair(prefill.worker, decode.worker, Estimate(4, num_to_store=1)))
    assert decode.worker.num_arriving_tokens == 1
    request.release_pair(tell_workers=False)
    assert decode.worker.num_arriving_tokens == 0


WORKERS = ("prefill", "decode", "both", "both")
WHAT_BEFALLS = ("begin", "compute", "hand over", "lose", "get past", "end")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(WHAT_BEFALLS),
            st.sampled_from([(0, 1), (0, 2), (2, 2), (2, 3), (3, 1)]),
            st.sampled_from([None, Estimate(0), Estimate(2), Estimate(1, num_to_store=0), Estimate(4, num_to_store=3)]),
        ),
        max_size=60,
    )
)
def test_loads_are_those_of_the_attempts_that_are_under_way(
    steps: list[tuple[int, str, tuple[int, int], Estimate | None]],
) -> None:
    workers = [Told(role).worker for role in WORKERS]
    requests = [ActiveRequest(RequestTracker(str(i), request_spec((1,) * (i + 4))), 100.0) for i in range(4)]
    for number, what, (prefill, decode), estimate in steps:
        request = requests[number]
        is_over = request.pair is None
        if what == "begin" and is_over:
            request.assign_pair(Pair(workers[prefill], workers[decode], estimate))
        elif what == "compute":
            request.prefill_is_computed()
        elif what == "hand over" and not is_over:
            request.prefill_is_over()
        elif what == "lose":
            request.charge_loss("p")
        elif what == "get past":
            request.clear_losses()
        elif what == "end":
            request.release_pair(tell_workers=False)
        for worker in workers:
            under_way = [r for r in requests if worker in r.workers]
            decoding = [r for r in requests if r.pair is not None and r.pair.decode is worker]
            assert worker.num_assigned == len(under_way)
            assert worker.num_decoding == len(decoding)
            assert worker.num_kv_tokens == sum(len(r.tracker.prompt_ids) for r in decoding)
            assert 0 <= worker.num_arriving_tokens <= worker.num_kv_tokens
            assert 0 <= worker.num_starting <= len(under_way) and 0 <= worker.num_suspects <= len(under_way)
            assert 0 <= worker.num_pending_tokens <= 7 * len(under_way)
    for request in requests:
        request.release_pair(tell_workers=False)
    for worker in workers:
        assert worker.assigned_here == NOTHING
        assert (worker.num_starting, worker.num_suspects, worker.num_pending_tokens, worker.num_assigned) == (0,) * 4
