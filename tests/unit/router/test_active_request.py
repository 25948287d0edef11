"""Whose load a request counts in, and who is told of its attempts' ends."""

from router.active_request import ActiveRequest
from router.tracker import RequestTracker
from router.worker import Estimate, Pair, Worker
from tandem.messages import Abort
from tandem.sampling_params import SamplingParams
from tests.fakes.scripted_worker import hello


class Told:
    """A worker and what it was sent."""

    def __init__(self, role: str) -> None:
        self.messages: list[object] = []
        self.worker = Worker(hello(role, role), self.messages.extend, lambda _: None, 0.0, 0.0)

    @property
    def load(self) -> tuple[int, int]:
        return self.worker.num_assigned, self.worker.num_pending_tokens


def begun(prefill: Told, decode: Told) -> ActiveRequest:
    tracker = RequestTracker("r", (1, 2, 3), SamplingParams(5), output_ids=[4])
    request = ActiveRequest(tracker, 100.0)
    tracker.begin_attempt("p", "d", 60.0)
    request.assign_pair(Pair(prefill.worker, decode.worker))
    return request


def test_an_attempt_counts_until_it_is_over() -> None:
    prefill, decode = Told("prefill"), Told("decode")
    request = begun(prefill, decode)
    # What prompt and output so far have is to be prefilled.
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
    # What it has cached is there already.
    request.assign_pair(Pair(prefill.worker, decode.worker, Estimate(4, num_to_store=1)))
    assert decode.worker.num_arriving_tokens == 1
    request.release_pair(tell_workers=False)
    assert decode.worker.num_arriving_tokens == 0
