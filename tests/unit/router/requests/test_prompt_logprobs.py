from array import array

import pytest

from tandem.messages import Admit, Finished, FirstToken, Prefill, PromptScored, TokenEvent
from tandem.prompt_logprobs import PackedLogprobs
from tandem.router.requests.prompt_logprobs import PromptLogprobs
from tandem.router.requests.tracker import RequestState, RequestTracker
from tandem.sampling_params import SamplingParams, TopLogprob
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import Client, RouterHarness, first_token, run, settle, step_tokens

ASKED = SamplingParams(5, num_prompt_logprobs=1)
PROMPT = (1, 2, 3, 4, 5)


def part(start: int, end: int, num_top: int = 1) -> PackedLogprobs:
    """Each token's value is minus its position."""
    positions = range(start, end)
    logprobs, numbers = array("f", [-p for p in positions]).tobytes(), array("I", positions).tobytes()
    return PackedLogprobs(start, num_top, logprobs, numbers, numbers * num_top, logprobs * num_top)


def test_parts_are_put_together() -> None:
    whole = PromptLogprobs(5)
    for start, end in ((1, 3), (3, 4), (4, 5)):
        assert not whole.is_complete
        whole.append(part(start, end))
    assert whole.is_complete and list(whole.logprobs) == [-1, -2, -3, -4]
    assert whole.top(3) == [TopLogprob(3, -3.0)]
    assert PromptLogprobs(1).is_complete, "nothing can be said of a first token"


@pytest.mark.parametrize("wrong", [part(2, 4), part(1, 6), PackedLogprobs(1, 2, *(b"\0\0\0\0",) * 4), part(0, 2)])
def test_parts_that_do_not_belong_there_are_refused(wrong: PackedLogprobs) -> None:
    with pytest.raises(ValueError, match="log probabilities of a prompt"):
        PromptLogprobs(5).append(wrong)


def tracker() -> RequestTracker:
    tracker = RequestTracker("r", request_spec(PROMPT, ASKED))
    tracker.begin_attempt("p", "d", 60.0)
    return tracker


def test_tokens_that_overtake_them_wait() -> None:
    t = tracker()
    assert t.record_tokens(TokenEvent("r", 0, 0, (10, 11))) == []
    t.record_finished(Finished("r", 0, "stop", 2, 0, 1))
    assert t.record_prompt_logprobs(PromptScored("r", 0, part(1, 3))) == []
    assert t.state is RequestState.RUNNING
    assert t.record_prompt_logprobs(PromptScored("r", 0, part(3, 5))) == [10, 11]
    assert t.state is RequestState.FINISHED


def test_a_first_token_without_them_is_a_worker_s_mistake() -> None:
    t = tracker()
    t.record_prompt_logprobs(PromptScored("r", 0, part(1, 4)))
    with pytest.raises(ValueError, match="before the log probabilities"):
        t.record_first_token(FirstToken("r", 0, 0, 10, "", 0, 1))
    with pytest.raises(ValueError, match="unrequested log probabilities"):
        plain = RequestTracker("r", request_spec(PROMPT))
        plain.begin_attempt("p", "d", 60.0)
        plain.record_prompt_logprobs(PromptScored("r", 0, part(1, 4)))


def test_half_of_them_are_computed_again_and_all_of_them_are_not() -> None:
    t = tracker()
    t.record_prompt_logprobs(PromptScored("r", 0, part(1, 3)))
    t.end_attempt()
    _, prefill = t.begin_attempt("p", "d", 60.0)
    assert prefill.sampling.num_prompt_logprobs == 1
    assert t.record_prompt_logprobs(PromptScored("r", 0, part(3, 5))) == [], "of the attempt before"
    t.record_prompt_logprobs(PromptScored("r", 1, part(1, 5)))
    assert t.record_first_token(FirstToken("r", 1, 0, 10, "", 0, 1)) == [10]
    t.end_attempt()
    admit, prefill = t.begin_attempt("p", "d", 60.0)
    assert admit is not None
    assert admit.sampling.num_prompt_logprobs is prefill.sampling.num_prompt_logprobs is None
    assert prefill.output_ids == (10,)
    assert t.prompt_logprobs is not None and t.prompt_logprobs.is_complete


def test_who_goes_on_has_them() -> None:
    t = RequestTracker("r", request_spec(PROMPT, ASKED, output_ids=[10]))
    _, prefill = t.begin_attempt("p", "d", 60.0)
    assert prefill.sampling.num_prompt_logprobs is None and not t.lacks_prompt_logprobs


def asking(h: RouterHarness) -> Client:
    return Client(h.router, h.router.make_tracker(request_spec(PROMPT, ASKED)))


@run
async def test_a_prefill_worker_that_dies_before_it_has_said_them_all_ends_the_attempt() -> None:
    # Even if the decode worker has the pages: only the prefill worker has the log probabilities.
    h = RouterHarness(2, 1)
    client = asking(h)
    await settle()
    request_id = client.tracker.request_id
    prefill = (h.p[0].of(Prefill) and h.p[0]) or h.p[1]
    other = h.p[1] if prefill is h.p[0] else h.p[0]
    prefill.say(PromptScored(request_id, 0, part(1, 3)))
    h.d[0].say(step_tokens(request_id, 0, 0, 10, 11))
    await settle()
    assert client.tokens == []
    h.router.lose_worker(prefill.worker, "disconnected", "killed")
    (again,) = other.of(Prefill)
    assert (again.attempt, again.output_ids, again.sampling.num_prompt_logprobs) == (1, (), 1)
    other.say(PromptScored(request_id, 1, part(1, 5)))
    other.say(first_token(request_id, 1, 0, 10))
    h.d[0].say(step_tokens(request_id, 1, 0, 10, 11))
    h.d[0].say(Finished(request_id, 1, "length", 2, 0, 1))
    await client.task
    assert client.tokens == [10, 11]
    assert client.tracker.prompt_logprobs is not None
    assert list(client.tracker.prompt_logprobs.logprobs) == [-1, -2, -3, -4]


@run
async def test_a_prefill_worker_that_dies_afterwards_does_not_matter() -> None:
    h = RouterHarness()
    client = asking(h)
    await settle()
    request_id = client.tracker.request_id
    h.d[0].say(step_tokens(request_id, 0, 0, 10))
    h.p[0].say(PromptScored(request_id, 0, part(1, 5)))
    h.router.lose_worker(h.p[0].worker, "disconnected", "killed")
    h.d[0].say(step_tokens(request_id, 0, 1, 11))
    h.d[0].say(Finished(request_id, 0, "length", 2, 0, 1))
    await client.task
    assert client.tokens == [10, 11] and client.tracker.attempt == 0
    assert len(h.d[0].of(Admit)) == 1
