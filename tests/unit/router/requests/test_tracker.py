import itertools
import random
from typing import Any

import pytest

from tandem.messages import Finished, FirstToken, TierHits, TokenEvent
from tandem.router.errors import RequestTimeoutError, UnavailableError
from tandem.router.requests.tracker import RequestState, RequestTracker
from tandem.sampling_params import SamplingParams, TokenLogprobs
from tests.fakes.request_spec import request_spec


def started(max_tokens: int = 10) -> RequestTracker:
    tracker = RequestTracker("r", request_spec(sampling=SamplingParams(max_tokens)))
    tracker.begin_attempt("p", "d", 60.0)
    return tracker


def first_token(attempt: int, index: int, token_id: int, reason: str = "") -> FirstToken:
    return FirstToken("r", attempt, index, token_id, reason, 0, 1)


def finished(attempt: int, num_tokens: int) -> Finished:
    return Finished("r", attempt, "stop", num_tokens, 0, 1)


def test_tokens_pass_in_order_each_once_whatever_the_workers_do() -> None:
    # All interleavings of both workers' messages.
    tokens = [10, 11, 12, 13]
    decode: list[tuple[str, Any]] = [
        ("tokens", TokenEvent("r", 0, 0, (10, 11))),
        ("tokens", TokenEvent("r", 0, 2, (12,))),
        ("tokens", TokenEvent("r", 0, 3, (13,))),
        ("finished", finished(0, 4)),
    ]
    for position in range(len(decode) + 1):
        tracker = started()
        events = [*decode[:position], ("first", first_token(0, 0, 10)), *decode[position:]]
        passed_on = []
        for kind, message in events:
            if kind == "tokens":
                passed_on += tracker.record_tokens(message)
            elif kind == "first":
                passed_on += tracker.record_first_token(message)
            else:
                tracker.record_finished(message)
        assert passed_on == tokens == tracker.output_ids
        assert tracker.state is RequestState.FINISHED and tracker.finish_reason == "stop"


def test_a_token_that_overtook_an_earlier_one_is_held_back() -> None:
    tracker = started()
    assert tracker.record_tokens(TokenEvent("r", 0, 1, (11,))) == []
    tracker.record_finished(finished(0, 2))
    assert tracker.state is RequestState.RUNNING
    assert tracker.record_first_token(first_token(0, 0, 10)) == [10, 11]
    assert tracker.state is RequestState.FINISHED


def test_random_orders_of_single_tokens() -> None:
    for seed in range(50):
        tracker = started(100)
        events = [TokenEvent("r", 0, i, (100 + i,)) for i in range(20)] * 2
        random.Random(seed).shuffle(events)
        passed_on = list(itertools.chain.from_iterable(tracker.record_tokens(e) for e in events))
        assert passed_on == [100 + i for i in range(20)]


def test_a_new_attempt_carries_on_and_the_old_one_has_no_effect() -> None:
    tracker = started()
    tracker.record_first_token(first_token(0, 0, 10))
    tracker.record_tokens(TokenEvent("r", 0, 2, (12,)))  # held back: lost with its attempt
    tracker.end_attempt()
    admit, prefill = tracker.begin_attempt("p2", "d2", 60.0)
    assert admit is not None
    assert (admit.attempt, admit.prompt_ids, admit.output_ids) == (1, (1, 2, 3), (10,))
    assert (prefill.output_ids, prefill.decode_worker_id) == ((10,), "d2")
    assert tracker.record_tokens(TokenEvent("r", 0, 1, (99,))) == []
    tracker.record_finished(finished(0, 1))
    assert tracker.state is RequestState.RUNNING
    assert tracker.record_first_token(first_token(1, 1, 11)) == [11]
    assert tracker.record_tokens(TokenEvent("r", 1, 1, (11, 12))) == [12]


def test_nothing_has_an_effect_between_attempts_or_after_the_end() -> None:
    tracker = started()
    tracker.end_attempt()
    assert tracker.record_first_token(first_token(0, 0, 10)) == []
    tracker.begin_attempt("p", "d", 60.0)
    assert tracker.record_first_token(first_token(1, 0, 10, reason="length")) == [10]
    assert tracker.state is RequestState.FINISHED
    assert tracker.record_tokens(TokenEvent("r", 1, 1, (11,))) == []
    assert not tracker.mark_failed("too late", UnavailableError)
    assert not tracker.mark_stopped() and not tracker.mark_aborted()
    assert tracker.state is RequestState.FINISHED and tracker.output_ids == [10]


def test_the_first_end_is_the_only_one() -> None:
    tracker = started()
    assert tracker.mark_failed("too slow", RequestTimeoutError)
    assert (tracker.state, tracker.failure, tracker.failure_class) == (
        RequestState.FAILED,
        "too slow",
        RequestTimeoutError,
    )
    assert not tracker.mark_stopped() and not tracker.mark_aborted()
    assert not tracker.mark_failed("gone", UnavailableError) and tracker.failure == "too slow"
    tracker = started()
    assert tracker.mark_stopped() and not tracker.mark_aborted()
    assert (tracker.state, tracker.finish_reason) == (RequestState.FINISHED, "stop")
    tracker = started()
    assert tracker.mark_aborted() and not tracker.mark_stopped()
    assert tracker.state is RequestState.ABORTED


def test_what_an_attempt_has_cost_is_forgotten_with_it() -> None:
    tracker = started()
    tracker.record_first_token(FirstToken("r", 0, 0, 10, "", 2, 5))
    tracker.end_attempt()
    tracker.begin_attempt("p", "d", 60.0)
    assert (tracker.prefill_cached_len, tracker.num_pages_computed) == (0, 0)
    tracker.record_finished(Finished("r", 1, "stop", 1, 3, 7, num_drafted=9, num_accepted=4))
    assert (tracker.decode_cached_len, tracker.num_pages_shipped) == (3, 7)
    assert (tracker.num_drafted, tracker.num_accepted) == (9, 4)


def test_what_prefill_found_is_known_at_the_end_whoever_is_heard_first() -> None:
    tracker = started()
    tracker.record_tokens(TokenEvent("r", 0, 0, (10, 11)))
    loaded = TierHits(host=1)
    tracker.record_finished(Finished("r", 0, "stop", 2, 3, 7, prefill_cached_len=2, prefill_loaded=loaded))
    assert tracker.state is RequestState.FINISHED
    assert (tracker.prefill_cached_len, tracker.prompt_cached_len) == (2, 2)
    assert tracker.prompt_loaded == loaded


def test_usage_counts_what_the_first_prefill_found() -> None:
    tracker = started()
    tracker.record_first_token(FirstToken("r", 0, 0, 10, "", 2, 1, loaded=TierHits(disk=1)))
    tracker.end_attempt()
    tracker.begin_attempt("p", "d", 60.0)
    tracker.record_first_token(FirstToken("r", 1, 1, 11, "", 4, 0, loaded=TierHits(host=3)))
    assert (tracker.prompt_cached_len, tracker.prompt_loaded) == (2, TierHits(disk=1))
    assert tracker.prefill_cached_len == 4


def test_a_prefix_that_reaches_into_the_output_counts_in_the_prompt_alone() -> None:
    tracker = started()
    num_prompt = len(tracker.prompt_ids)
    tracker.record_first_token(FirstToken("r", 0, 0, 10, "", num_prompt + 4, 1, loaded=TierHits(host=2, disk=4)))
    assert (tracker.prompt_cached_len, tracker.prompt_loaded) == (num_prompt, TierHits(host=2))


def test_moments_are_those_of_the_last_attempt() -> None:
    tracker = started()
    tracker.moments.update(received=1, assigned=2, prefill_started=3, decode_started=4, first_token_sent=5)
    tracker.clock_uncertainty_ns = 6
    tracker.end_attempt()
    assert tracker.moments == {"received": 1, "first_assigned": 2, "first_token_sent": 5}
    assert tracker.clock_uncertainty_ns == 0
    tracker.begin_attempt("p", "d", 60.0)
    tracker.moments["assigned"] = 7
    tracker.end_attempt()
    assert tracker.moments == {"received": 1, "first_assigned": 2, "first_token_sent": 5}


def test_a_first_token_that_ends_the_request_is_its_last() -> None:
    tracker = started()
    tracker.moments["first_token"] = 5
    tracker.record_first_token(FirstToken("r", 0, 0, 10, "stop", 2, 1))
    assert tracker.moments == {"received": 1, "first_token": 5, "last_token": 5}


def logprobs(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(i)) for i in token_ids)


def test_logprobs_stay_with_their_tokens_over_attempts() -> None:
    for seed in range(50):
        tracker = RequestTracker("r", request_spec(sampling=SamplingParams(30, num_logprobs=0)))
        rng = random.Random(seed)
        for attempt in range(3):
            tracker.begin_attempt("p", "d", 60.0)
            start = len(tracker.output_ids)
            # Each token twice, in any order, some lost.
            events = [TokenEvent("r", attempt, i, (i, i + 1), logprobs(i, i + 1)) for i in range(start, start + 8)]
            events += [TokenEvent("r", attempt, i, (i,), logprobs(i)) for i in range(start, start + 8)]
            rng.shuffle(events)
            tracker.record_first_token(FirstToken("r", attempt, start, start, "", 0, 1, logprobs=logprobs(start)))
            for event in events[: rng.randint(4, 16)]:
                tracker.record_tokens(event)
            tracker.end_attempt()
            tracker.record_tokens(TokenEvent("r", attempt, start, (99,), logprobs(99)))
        assert tracker.output_ids == list(range(len(tracker.output_ids)))
        assert tuple(tracker.output_logprobs) == logprobs(*tracker.output_ids)


def test_a_worker_that_leaves_logprobs_out_is_not_believed() -> None:
    tracker = RequestTracker("r", request_spec(sampling=SamplingParams(10, num_logprobs=2)))
    tracker.begin_attempt("p", "d", 60.0)
    with pytest.raises(ValueError, match="0 log probabilities for 1 tokens"):
        tracker.record_first_token(first_token(0, 0, 10))
    with pytest.raises(ValueError, match="1 log probabilities for 2 tokens"):
        tracker.record_tokens(TokenEvent("r", 0, 0, (10, 11), logprobs(10)))
    assert tracker.output_ids == []
