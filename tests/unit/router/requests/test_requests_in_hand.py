from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.requests_in_hand import RequestsInHand
from tandem.router.requests.tracker import RequestTracker
from tests.fakes.request_spec import request_spec


def new_request(number: int, deadline: float = 100.0, output_ids: tuple[int, ...] = ()) -> ActiveRequest:
    tracker = RequestTracker(f"r{number}", request_spec((1, 2), output_ids=output_ids))
    return ActiveRequest(tracker, deadline, number)


def test_who_waits_for_a_first_token_is_counted_until_it_comes_or_nothing_does() -> None:
    requests = RequestsInHand()
    answered, ended, left, resumed = (new_request(n, output_ids=(7,) if n == 3 else ()) for n in range(4))
    for request in (answered, ended, left, resumed):
        requests.add(request)
    assert requests.num_queued == 4
    requests.mark_token(resumed)
    for _ in range(2):
        requests.mark_token(answered)
        assert requests.num_queued == 2
    requests.mark_ended(ended)
    requests.remove(ended)
    assert requests.num_queued == 1
    requests.remove(left)
    assert requests.num_queued == 0 and len(requests) == 2
    assert [request.number for request in requests] == [0, 3]


def test_only_the_oldest_can_be_past_their_deadlines() -> None:
    requests = RequestsInHand()
    for number in range(5):
        requests.add(new_request(number, deadline=100.0 + number))
    ended = requests.get("r1")
    assert ended is not None
    requests.mark_ended(ended)
    assert [r.number for r in requests.past_deadline(99.0)] == []
    assert [r.number for r in requests.past_deadline(102.0)] == [0, 2]
    assert requests.undelivered() == [ended] and requests.get("r1") is ended
    requests.remove(ended)
    assert requests.undelivered() == [] and requests.get("r1") is None


def test_a_decode_worker_s_word_is_waited_for_until_it_comes() -> None:
    requests = RequestsInHand()
    silent, heard = new_request(0), new_request(1)
    for request in (silent, heard):
        requests.add(request)
        request.decode_deadline = 50.0
        requests.await_decode(request)
    assert requests.without_word(49.0) == []
    heard.decode_deadline = None
    assert requests.without_word(50.0) == [silent]
    silent.decode_deadline = None
    assert requests.without_word(51.0) == [] and not requests._awaiting_decode
