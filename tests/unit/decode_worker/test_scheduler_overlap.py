"""Overlapping decode steps, launched before the previous tokens are known.

Output stays the same, and no page is reused while a step launched with it may run.
"""

from typing import Any

import pytest

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Admit, Finished, GaveBack, Prefill, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter, RouterLost
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.workers import ListOutbox, WorkerPair

PROMPT = [5, 3, 8, 1, 7, 2]
STEP_S = 0.5


def make_pair(*, overlap: bool = True, **decode: Any) -> WorkerPair:
    """Without `step_s`, each step is composed before the previous one has run."""
    decode.setdefault("config", DecodeConfig(overlap=overlap))
    return WorkerPair(prefill={"num_pages": 512}, asynchronous=True, **decode)


def run_until_in_flight(pair: WorkerPair, num_steps: int) -> None:
    """Run until a step is in flight and `num_steps` have been launched."""
    for _ in range(100):
        if len(pair.d.engine.batches) >= num_steps:
            assert pair.d.engine.num_launched == 1
            return
        pair.turn()
    raise AssertionError("no step is launched")


def reported(pair: WorkerPair) -> list[Any]:
    """Return the messages to the router, without times."""
    events = [e for m in pair.d.outbox.of(Tokens) for e in m.events]
    ends = [(m.request_id, m.finish_reason, m.num_output_tokens) for m in pair.d.outbox.of(Finished)]
    return [sorted(events, key=lambda e: (e.request_id, e.index)), sorted(ends)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("stop_at", [0, 1, 2, 3, 4, 7, 8, 9])
def test_every_ending_matches_the_plain_loop(max_tokens: int, stop_at: int) -> None:
    stop = expected_tokens(PROMPT, 10)[stop_at]
    pairs = [make_pair(overlap=overlap, page_size=2) for overlap in (False, True)]
    for pair in pairs:
        pair.submit("a", PROMPT, max_tokens=max_tokens, stop_token_ids=(stop,), num_logprobs=0)
        pair.submit("b", [1, *PROMPT], max_tokens=6)
        pair.run()
        pair.check_idle()
    plain, overlapped = pairs
    assert reported(overlapped) == reported(plain)
    num_tokens = min(max_tokens, stop_at + 1)
    whole = [*PROMPT, *expected_tokens(PROMPT, num_tokens)]
    # The cached pages are equal too; a request of one token ends at prefill.
    num_pages = (len(whole) - 1) // 2 if num_tokens > 1 else 0
    assert [len(pair.d.cache.peek(whole)) for pair in pairs] == [num_pages] * 2


def test_only_a_stop_token_costs_a_step_too_many() -> None:
    pair = make_pair()
    pair.submit("a", PROMPT, max_tokens=6)
    pair.run()
    assert len(pair.d.engine.batches) == 5
    pair.submit("b", [9, *PROMPT], max_tokens=6, stop_token_ids=(expected_tokens([9, *PROMPT], 6)[3],))
    pair.run()
    assert len(pair.d.engine.batches) == 5 + 4


def test_without_overlap_no_step_is_left_in_flight() -> None:
    pair = make_pair(overlap=False)
    pair.submit("a", PROMPT, max_tokens=6)
    while pair.turn():
        assert pair.d.engine.num_launched == 0
    assert pair.output("a") == expected_tokens(PROMPT, 6)


def test_step_is_launched_before_the_previous_one_has_run() -> None:
    pair = make_pair(page_size=2)
    pair.submit("a", PROMPT, max_tokens=12)
    run_until_in_flight(pair, 1)
    seen = []
    run_next = pair.d.engine.run_next
    pair.d.engine.run_next = lambda: seen.append(pair.d.engine.num_launched) or run_next()  # type: ignore[method-assign]
    pair.run()
    # All but the last, across five page boundaries.
    assert seen == [2] * 10 + [1]
    assert pair.output("a") == expected_tokens(PROMPT, 12)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("how", ["abort", "router lost"])
def test_request_ended_in_flight_keeps_its_pages_until_the_step_ends(num_steps: int, how: str) -> None:
    pair = make_pair(page_size=2)
    pair.submit("a", PROMPT, max_tokens=20)
    run_until_in_flight(pair, num_steps)
    num_locked = pair.d.scheduler.stats().num_locked_pages
    if how == "abort":
        pair.abort("a")
    else:
        pair.d.scheduler.receive(RouterLost(""))
    pair.check()
    stats = pair.d.scheduler.stats()
    assert (stats.num_running, stats.num_locked_pages) == (0, num_locked)
    pair.run()
    pair.check_idle()
    assert pair.output("a") == expected_tokens(PROMPT, 20)[: len(pair.tokens("a"))]
    # Computed pages are found again and are correct.
    pair.submit("again", PROMPT, max_tokens=20)
    pair.run()
    assert pair.output("again") == expected_tokens(PROMPT, 20)


def test_pages_of_a_request_ended_in_flight_are_granted_after_the_step() -> None:
    pair = make_pair(page_size=2, num_pages=8, step_s=STEP_S)
    pair.submit("a", PROMPT, max_tokens=8)
    run_until_in_flight(pair, 2)
    pair.abort("a")
    pair.submit("b", list(range(100, 114)), max_tokens=2)
    for _ in range(5):
        pair.turn()
        assert pair.d.scheduler.stats().num_leased_pages == 0
    pair.d.engine.run_next()
    pair.run()
    pair.clock.advance(STEP_S)
    pair.run()
    assert pair.output("b") == expected_tokens(list(range(100, 114)), 2)
    pair.check_idle()


def test_given_back_request_has_sent_every_token() -> None:
    pair = make_pair(num_pages=8)
    pair.submit("old", list(range(8)), max_tokens=20, arrival_ns=1)
    pair.submit("young", list(range(50, 57)), max_tokens=20, arrival_ns=2)
    while not pair.d.outbox.of(GaveBack):
        assert pair.turn()
        pair.check()
    assert [m.request_id for m in pair.d.outbox.of(GaveBack)] == ["young"]
    num_steps = sum(len(lens) == 2 for _, lens in pair.d.engine.batches)
    assert pair.output("young") == expected_tokens(list(range(50, 57)), 1 + num_steps)
    pair.run()
    assert pair.output("old") == expected_tokens(list(range(8)), 20)
    pair.check_idle()


def test_pages_freed_by_the_step_in_flight_prevent_giving_back() -> None:
    pair = make_pair(num_pages=8)
    # Both fill the pool; the second ends with the step after which the first needs another page.
    pair.submit("first", list(range(14)), max_tokens=10, arrival_ns=1)
    pair.submit("second", list(range(50, 64)), max_tokens=3, arrival_ns=2)
    pair.run()
    assert pair.d.outbox.of(GaveBack) == []
    assert pair.output("first") == expected_tokens(list(range(14)), 10)
    assert pair.output("second") == expected_tokens(list(range(50, 64)), 3)


def test_a_full_batch_takes_turns_with_older_requests() -> None:
    pair = make_pair(config=DecodeConfig(max_batch_size=1))
    pair.submit("young", PROMPT, max_tokens=9, arrival_ns=2)
    run_until_in_flight(pair, 3)
    pair.submit("old", [9, *PROMPT], max_tokens=5, arrival_ns=1)
    pair.run()
    assert pair.output("young") == expected_tokens(PROMPT, 9)
    assert pair.output("old") == expected_tokens([9, *PROMPT], 5)
    assert all(len(lens) == 1 for _, lens in pair.d.engine.batches)


# --- Time ---


def paced_pair() -> WorkerPair:
    """Return a pair with a step in flight and known step times, so that the next step is not due."""
    pair = make_pair(step_s=STEP_S)
    pair.submit("a", PROMPT, max_tokens=30)
    run_until_in_flight(pair, 2)
    return pair


def test_the_next_step_waits_for_its_time() -> None:
    pair = paced_pair()
    started = pair.clock.now
    deadline = pair.d.scheduler.next_deadline()
    assert deadline is not None and started + 0.9 * STEP_S < deadline < started + STEP_S
    assert pair.d.scheduler.step() is False
    assert len(pair.d.engine.batches) == 2
    pair.clock.now = deadline
    assert pair.d.scheduler.step() is True
    assert (len(pair.d.engine.batches), pair.d.engine.num_launched) == (3, 1)


def test_a_step_that_ends_early_is_followed_at_once() -> None:
    pair = paced_pair()
    pair.d.engine.run_next()
    assert pair.d.scheduler.step() is True
    assert len(pair.d.engine.batches) == 3


def test_request_arriving_during_a_step_joins_the_next() -> None:
    pair = paced_pair()
    pair.submit("b", [9, *PROMPT], max_tokens=30)
    for _ in range(10):
        pair.turn()
    assert pair.d.scheduler.num_running == 2 and len(pair.d.engine.batches) == 2
    pair.clock.advance(STEP_S)
    pair.d.scheduler.step()
    assert pair.d.engine.batches[2:] == [("decode", [1, 1])]


# --- Role both ---


def test_one_worker_for_both_phases_loses_no_token() -> None:
    clock, outbox = FakeClock(), ListOutbox()
    engine, cache = FakeEngine(64, 4, asynchronous=True), CacheManager(64, 4)
    config = PrefillConfig(chunk_size=4, min_shared_tokens=4)
    both = make_both_scheduler("both", engine, cache, outbox, config, DecodeConfig(), clock=clock)
    prompts = {f"r{i}": (*PROMPT, i, *PROMPT) for i in range(5)}
    for name, prompt in prompts.items():
        sampling = SamplingParams(9)
        both.receive(FromRouter(Admit(name, 0, prompt, (), sampling, 60.0)))
        both.receive(FromRouter(Prefill(name, 0, prompt, (), sampling, "both")))
        for _ in range(3):
            both.step()
            assert both.check_integrity() == ""
    while both.step() or engine.num_launched:
        assert both.next_deadline() is not None or engine.num_launched == 0
        if engine.num_launched:
            engine.run_next()
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    for event in [e for m in outbox.of(Tokens) for e in m.events]:
        outputs[event.request_id] += event.token_ids
    assert outputs == {name: expected_tokens(prompt, 9) for name, prompt in prompts.items()}
