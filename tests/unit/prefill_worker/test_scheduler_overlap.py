"""Overlapping prefill forwards. Tokens and messages stay the same, no page ships before it is computed, and no page is
reused while a forward launched with it may run."""

from typing import Any

import pytest

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Admit, Failed, FirstToken, Prefill, PrefillDeferred, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter, RouterLost
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.workers import ListOutbox, WorkerPair

CHUNK_SIZE = 8
PROMPT = list(range(30))


def make_pair(*, overlap: bool = True, min_shared_tokens: int = 4, num_pages: int = 128, **kwargs: Any) -> WorkerPair:
    config = PrefillConfig(CHUNK_SIZE, min_shared_tokens=min_shared_tokens, overlap=overlap)
    prefill = {"config": config, "num_pages": num_pages, "asynchronous": True}
    return WorkerPair(prefill=prefill, **{"num_pages": 512, **kwargs})


def without_times(message: WorkerMessage) -> tuple[Any, ...]:
    assert isinstance(message, FirstToken)
    return (
        message.request_id,
        message.index,
        message.token_id,
        message.finish_reason,
        message.cached_len,
        message.num_pages_computed,
        message.logprobs,
    )


WORKLOADS: dict[str, dict[str, list[int]]] = {
    "chunks": {"a": PROMPT},
    "one chunk": {"a": PROMPT[:3]},
    "whole pages": {"a": PROMPT[:16]},
    "several": {f"r{i}": list(range(100 * i, 100 * i + n)) for i, n in enumerate((3, 8, 17, 1, 40, 7))},
    "shared": {f"r{i}": [*PROMPT[: 5 * i], 500 + i] for i in range(6)},
    "the same": {f"r{i}": PROMPT for i in range(4)},
}


@pytest.mark.parametrize("min_shared_tokens", [4, 1000])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_tokens_and_messages_are_those_of_the_plain_loop(workload: str, min_shared_tokens: int) -> None:
    prompts = WORKLOADS[workload]
    pairs = [make_pair(overlap=overlap, min_shared_tokens=min_shared_tokens) for overlap in (False, True)]
    for pair in pairs:
        for name, prompt in prompts.items():
            pair.submit(name, prompt, num_logprobs=0)
        while pair.turn():
            pair.check()
        pair.check_idle()
        for name, prompt in prompts.items():
            assert pair.output(name) == expected_tokens(prompt, 5)
    plain, overlapped = pairs
    assert [without_times(m) for m in overlapped.p.outbox.of(FirstToken)] == [
        without_times(m) for m in plain.p.outbox.of(FirstToken)
    ]
    assert overlapped.p.engine.batches == plain.p.engine.batches
    # The number of pages shipped twice depends on the time at which the decode worker gets shared pages.
    (shipped,), (least,) = overlapped.p.handover.shipped, plain.p.handover.shipped
    assert shipped.num_pages >= least.num_pages
    for prompt in prompts.values():
        assert len(overlapped.p.cache.peek(prompt)) == len(prompt) // 4


def test_a_forward_is_launched_before_the_one_before_has_run() -> None:
    pair = make_pair()
    seen = []
    run_next = pair.p.engine.run_next
    pair.p.engine.run_next = lambda: seen.append(pair.p.engine.num_launched) or run_next()  # type: ignore[method-assign]
    pair.submit("a", PROMPT)
    pair.run()
    assert seen == [2, 2, 2, 1]


def test_without_overlap_no_forward_is_left_in_flight() -> None:
    pair = make_pair(overlap=False)
    pair.submit("a", PROMPT)
    while pair.turn():
        assert pair.p.engine.num_launched == 0
    assert pair.output("a") == expected_tokens(PROMPT, 5)


def test_two_forwards_at_most_are_in_flight_and_none_at_rest() -> None:
    pair = make_pair()
    for i in range(3):
        pair.submit(f"r{i}", [i, *PROMPT])
    while pair.turn():
        assert pair.p.engine.num_launched <= 2
    assert pair.p.engine.num_launched == 0 and pair.p.scheduler.step() is False


def test_what_has_been_said_does_not_wait_for_the_device() -> None:
    """A lease request leaves before the thread waits for any forward."""
    pair = make_pair()
    unsent_at_run: list[int] = []
    num_flushed = 0

    def flush() -> bool:
        nonlocal num_flushed
        num_flushed = len(pair.p.outbox.link)
        return bool(num_flushed)

    run_next = pair.p.engine.run_next

    def run() -> None:
        unsent_at_run.append(len(pair.p.outbox.link) - num_flushed)
        run_next()

    pair.p.outbox.flush = flush  # type: ignore[method-assign]
    pair.p.engine.run_next = run  # type: ignore[method-assign]
    pair.submit("a", PROMPT[:8])
    pair.p.scheduler.step()
    pair.submit("b", [9, *PROMPT[:8]])
    pair.p.scheduler.step()
    for _ in range(2):
        pair.p.engine.run_next()
    assert unsent_at_run == [0, 0]


def test_handovers_go_on_while_a_forward_runs() -> None:
    """Grant, pages and commit pass while the device is busy."""
    pair = make_pair()
    pair.submit("a", PROMPT[:8])
    pair.p.scheduler.step()
    pair.p.engine.run_next()
    pair.submit("b", [9, *PROMPT])
    pair.p.scheduler.step()
    for _ in range(3):
        pair.deliver()
        pair.p.scheduler.step()
        pair.d.scheduler.step()
    assert pair.p.engine.num_launched == 2
    pair.deliver()
    while len(pair.output("a")) < 5:
        assert pair.d.scheduler.step()
    assert pair.output("a") == expected_tokens(PROMPT[:8], 5)
    pair.run()
    pair.check_idle()


def test_a_page_is_shipped_when_it_is_computed_and_not_when_it_is_launched() -> None:
    pair = make_pair()
    pair.submit("a", PROMPT)
    pair.p.scheduler.step()
    pair.deliver()
    pair.d.scheduler.step()
    pair.deliver()  # the grant arrives while the first chunk is in flight

    def num_shipped() -> int:
        (shipped,) = pair.p.handover.shipped
        return shipped.num_pages

    pair.p.scheduler.step()
    shipped = [num_shipped()]
    for num_launched in (2, 2, 2, 1):
        assert pair.p.engine.num_launched == num_launched
        pair.p.engine.run_next()
        pair.p.scheduler.step()
        shipped.append(num_shipped())
    assert shipped == [0, 2, 4, 6, 8]
    pair.run()
    assert pair.output("a") == expected_tokens(PROMPT, 5)


def test_who_comes_finds_pages_in_flight_and_ships_them_when_they_are_computed() -> None:
    pair = make_pair()
    pair.submit("a", PROMPT[:8])
    pair.p.scheduler.step()
    assert pair.p.engine.num_launched == 1
    pair.submit("b", [*PROMPT[:8], 500])
    pair.run()
    # Only its own token, in a later forward.
    assert [lens for _, lens in pair.p.engine.batches] == [[8], [1]]
    assert pair.output("b") == expected_tokens([*PROMPT[:8], 500], 5)
    pair.check_idle()


def launch(pair: WorkerPair, prompt: list[int], num_run: int) -> None:
    """Submits a prompt and runs `num_run` of its chunks; up to two more are launched."""
    pair.submit("a", prompt)
    for number in range(num_run + 2):
        if number > 1:
            pair.p.engine.run_next()
        pair.p.scheduler.step()
        pair.d.scheduler.step()
        pair.deliver()


@pytest.mark.parametrize("num_run", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "router lost", "link lost"])
def test_a_job_that_ends_in_flight_keeps_its_pages_until_its_forwards_are_done(num_run: int, how: str) -> None:
    pair = make_pair(num_pages=8)
    launch(pair, PROMPT, num_run)
    assert pair.p.engine.num_launched == (1 if num_run == 3 else 2)
    if how == "abort":
        pair.abort("a")
    elif how == "router lost":
        for side in (pair.p, pair.d):
            side.scheduler.receive(RouterLost(""))
    else:
        pair.cut_link()
        pair.open_link()
        pair.p.scheduler._settle_handovers()
        pair.abort("a")
    pair.check()
    stats = pair.p.scheduler.stats()
    assert (stats.num_running, stats.num_locked_pages) == (0, 8)
    # These pages are not reused yet, and their forwards' results are dropped.
    other = list(range(100, 130))
    pair.submit("b", other)
    pair.p.scheduler._start_jobs(CHUNK_SIZE, None)
    assert pair.p.scheduler.stats().num_queued == 1
    pair.run()
    assert pair.output("b") == expected_tokens(other, 5)
    assert [m.request_id for m in pair.p.outbox.of(FirstToken)] == ["b"]
    assert bool(pair.p.outbox.of(Failed)) == (how == "link lost")
    pair.check_idle()


@pytest.mark.parametrize("num_run", [0, 1, 2, 3])
def test_what_an_aborted_job_had_launched_is_found_again_right_as_it_is(num_run: int) -> None:
    pair = make_pair()
    launch(pair, PROMPT, num_run)
    pair.abort("a")
    pair.submit("again", PROMPT)
    pair.run()
    assert pair.output("again") == expected_tokens(PROMPT, 5)
    # Only the partial last page is computed twice.
    assert pair.p.engine.counters.prompt_tokens_computed == (32 if num_run >= 2 else 30)
    pair.check_idle()


def test_duplicates_are_not_reused_before_the_forward_that_writes_them_is_done() -> None:
    pair = make_pair(min_shared_tokens=1000, num_pages=4)
    for name in ("a", "b"):
        pair.submit(name, PROMPT[:4], max_tokens=1)
    pair.p.scheduler.step()
    # One page is in the tree, and its duplicate waits to be freed.
    assert (pair.p.engine.num_launched, pair.p.cache.num_free_pages) == (1, 2)
    assert pair.p.engine.pages_in_use & set(pair.p.cache._allocator.free_pages()) == set()
    pair.check()
    pair.run()
    assert [m.token_id for m in pair.p.outbox.of(FirstToken)] == expected_tokens(PROMPT[:4], 1) * 2
    pair.check_idle()


def test_who_finds_no_pages_waits_for_those_of_a_forward_in_flight() -> None:
    pair = make_pair(num_pages=9)
    prompts = {name: list(range(100 * i, 100 * i + 20)) for i, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        pair.submit(name, prompt)
    while pair.turn():
        pair.check()
    assert [m.request_id for m in pair.p.outbox.of(FirstToken)] == list(prompts)
    for name, prompt in prompts.items():
        assert pair.output(name) == expected_tokens(prompt, 5)
    pair.check_idle()


def test_who_waits_too_long_for_room_goes_back_to_the_router_beside_a_forward_in_flight() -> None:
    pair = make_pair(num_pages=64)
    # Nothing reaches the decode worker, so nothing is granted.
    pair.submit("waits", PROMPT[:8])
    pair.p.scheduler.step()
    pair.p.engine.run_next()
    pair.p.scheduler.step()
    assert [m.request_id for m in pair.p.outbox.of(FirstToken)] == ["waits"]
    deadline = pair.p.scheduler.next_deadline()
    assert deadline is not None
    pair.submit("b", [9, *PROMPT])
    pair.p.scheduler.step()
    pair.clock.now = deadline
    assert pair.p.engine.num_launched == 1
    pair.p.scheduler.step()
    assert pair.p.outbox.of(PrefillDeferred) == [PrefillDeferred("waits", 0)]
    # The router restarts it elsewhere.
    pair.abort("waits")
    pair.check()
    while pair.p.engine.num_launched:
        pair.p.engine.run_next()
        pair.p.scheduler.step()
    assert [m.token_id for m in pair.p.outbox.of(FirstToken)][1:] == expected_tokens([9, *PROMPT], 1)


# --- Role both ---


class Both:
    """A both worker with overlapping prefills."""

    def __init__(self, max_tokens: int) -> None:
        clock, self.outbox = FakeClock(), ListOutbox()
        self.engine, cache = FakeEngine(64, 4, asynchronous=True), CacheManager(64, 4)
        config = PrefillConfig(CHUNK_SIZE, min_shared_tokens=4)
        self.scheduler = make_both_scheduler(
            "both", self.engine, cache, self.outbox, config, DecodeConfig(), clock=clock
        )
        self._sampling = SamplingParams(max_tokens)

    def submit(self, name: str, prompt: list[int]) -> None:
        self.scheduler.receive(FromRouter(Admit(name, 0, tuple(prompt), (), self._sampling, 60.0)))
        self.scheduler.receive(FromRouter(Prefill(name, 0, tuple(prompt), (), self._sampling, "both")))

    def turn(self) -> bool:
        """Runs a step or a forward; returns whether there was either."""
        worked = self.scheduler.step()
        assert self.scheduler.check_integrity() == ""
        if not worked and self.engine.num_launched:
            self.engine.run_next()
            return True
        return worked

    def run(self) -> None:
        while self.turn():
            pass
        assert self.engine.num_launched == 0

    def output(self, name: str) -> list[int]:
        events = [e for m in self.outbox.of(Tokens) for e in m.events if e.request_id == name]
        return [token_id for e in events for token_id in e.token_ids]


def two_come_while_one_is_decoded() -> tuple[Both, int]:
    """A worker that decodes a and has just got b and c, with its number of launched forwards."""
    both = Both(max_tokens=6)
    both.submit("a", PROMPT[:8])
    while not both.output("a"):
        both.turn()
    both.submit("b", [9, *PROMPT[:7]])
    both.submit("c", [10, *PROMPT])
    return both, len(both.engine.batches)


def test_prefills_of_one_worker_for_both_phases_overlap_while_nothing_is_decoded() -> None:
    both = Both(max_tokens=3)
    both.submit("a", PROMPT)
    both.scheduler.step()
    both.scheduler.step()
    assert (len(both.engine.batches), both.engine.num_launched) == (2, 2)
    both.run()
    assert both.output("a") == expected_tokens(PROMPT, 3)


def test_a_prompt_computed_while_others_are_decoded_is_decoded_with_them_at_once() -> None:
    both, num_before = two_come_while_one_is_decoded()
    both.run()
    assert both.engine.batches[num_before : num_before + 2] == [("prefill", [8]), ("decode", [1, 1])]
    for name, prompt in (("a", PROMPT[:8]), ("b", [9, *PROMPT[:7]]), ("c", [10, *PROMPT])):
        assert both.output(name) == expected_tokens(prompt, 6)


def test_what_is_to_be_decoded_here_does_not_wait_behind_the_next_prompt() -> None:
    both = Both(max_tokens=3)
    both.submit("a", PROMPT[:8])
    both.submit("b", [9, *PROMPT[:7]])
    both.scheduler.step()
    both.scheduler.step()
    # The second prompt waits for the first one's decode step to be launched.
    assert both.engine.batches == [("prefill", [8])]
    both.run()
    assert both.engine.batches[1:3] == [("decode", [1]), ("prefill", [8])]
    assert both.output("b") == expected_tokens([9, *PROMPT[:7]], 3)


def test_the_tokens_of_a_decode_step_in_flight_do_not_wait_for_the_prompt_behind_it() -> None:
    both = Both(max_tokens=6)
    both.submit("a", PROMPT[:8])
    while len(both.output("a")) < 3:
        both.turn()
    assert both.engine.num_launched == 1
    num_known = len(both.output("a"))
    both.submit("b", [9, *PROMPT[:7]])
    both.scheduler.step()
    # Nothing waits for either.
    assert (both.engine.num_launched, len(both.output("a"))) == (2, num_known)
    both.engine.run_next()
    assert both.scheduler.step()
    assert (both.engine.num_launched, len(both.output("a"))) == (1, num_known + 1)
    assert both.engine.batches[-1] == ("prefill", [8])
    both.run()
    assert both.output("a") == expected_tokens(PROMPT[:8], 6)


def test_the_device_has_a_decode_step_to_run_while_the_next_prompt_is_prepared() -> None:
    both, num_before = two_come_while_one_is_decoded()
    while len(both.engine.batches) < num_before + 2:
        both.turn()
    assert both.engine.batches[num_before:] == [("prefill", [8]), ("decode", [1, 1])]
    assert both.engine.num_launched == 1
    both.scheduler.step()
    # The step has not run.
    assert [mode for mode, _ in both.engine.batches[num_before:]] == ["prefill", "decode", "prefill"]
    assert both.engine.num_launched == 2
    both.run()
