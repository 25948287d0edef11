"""Overlapping prefill forward passes keep tokens and messages.

No page ships before it is computed, and no page is reused while a forward pass launched with it may run.
"""

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
def test_tokens_and_messages_match_the_plain_loop(workload: str, min_shared_tokens: int) -> None:
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
    # Pages shipped twice depend on the time at which the decode worker gets shared pages.
    (shipped,), (least,) = overlapped.p.handover.shipped, plain.p.handover.shipped
    assert shipped.num_pages >= least.num_pages
    for prompt in prompts.values():
        assert len(overlapped.p.cache.peek(prompt)) == len(prompt) // 4


def test_forward_is_launched_before_the_previous_one_has_run() -> None:
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


def test_at_most_two_forwards_are_in_flight() -> None:
    pair = make_pair()
    for i in range(3):
        pair.submit(f"r{i}", [i, *PROMPT])
    while pair.turn():
        assert pair.p.engine.num_launched <= 2
    assert pair.p.engine.num_launched == 0 and pair.p.scheduler.step() is False


def test_messages_do_not_wait_for_the_device() -> None:
    """A lease request leaves before the thread waits for any forward pass."""
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


def test_page_is_shipped_when_computed_not_when_launched() -> None:
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


def test_pages_in_flight_are_shared_and_shipped_once_computed() -> None:
    pair = make_pair()
    pair.submit("a", PROMPT[:8])
    pair.p.scheduler.step()
    assert pair.p.engine.num_launched == 1
    pair.submit("b", [*PROMPT[:8], 500])
    pair.run()
    assert [lens for _, lens in pair.p.engine.batches] == [[8], [1]]
    assert pair.output("b") == expected_tokens([*PROMPT[:8], 500], 5)
    pair.check_idle()


def launch(pair: WorkerPair, prompt: list[int], num_run: int) -> None:
    """Submit a prompt and run `num_run` of its chunks; up to two more are launched."""
    pair.submit("a", prompt)
    for number in range(num_run + 2):
        if number > 1:
            pair.p.engine.run_next()
        pair.p.scheduler.step()
        pair.d.scheduler.step()
        pair.deliver()


@pytest.mark.parametrize("num_run", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "router lost", "link lost"])
def test_job_ended_in_flight_keeps_its_pages_until_its_forwards_end(num_run: int, how: str) -> None:
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
    # These pages are not reused yet, and their forward passes' results are dropped.
    other = list(range(100, 130))
    pair.submit("b", other)
    list(pair.p.scheduler._start_queued(pair.p.scheduler._waiting.start_order))
    assert pair.p.scheduler.stats().num_queued == 1
    pair.run()
    assert pair.output("b") == expected_tokens(other, 5)
    assert [m.request_id for m in pair.p.outbox.of(FirstToken)] == ["b"]
    assert bool(pair.p.outbox.of(Failed)) == (how == "link lost")
    pair.check_idle()


@pytest.mark.parametrize("num_run", [0, 1, 2, 3])
def test_aborted_job_s_launched_pages_are_cached_correctly(num_run: int) -> None:
    pair = make_pair()
    launch(pair, PROMPT, num_run)
    pair.abort("a")
    pair.submit("again", PROMPT)
    pair.run()
    assert pair.output("again") == expected_tokens(PROMPT, 5)
    # Only the partial last page is computed twice.
    assert pair.p.engine.counters.prompt_tokens_computed == (32 if num_run >= 2 else 30)
    pair.check_idle()


def test_duplicates_are_not_reused_before_their_forward_ends() -> None:
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


def test_request_without_pages_waits_for_a_forward_in_flight() -> None:
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


def test_long_wait_for_pages_defers_a_request_beside_a_forward() -> None:
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
    pair.abort("waits")
    pair.check()
    while pair.p.engine.num_launched:
        pair.p.engine.run_next()
        pair.p.scheduler.step()
    assert [m.token_id for m in pair.p.outbox.of(FirstToken)][1:] == expected_tokens([9, *PROMPT], 1)


# --- Role both ---


class Both:
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
    """Return a worker that decodes a and has just got b and c, with its number of launched forward passes."""
    both = Both(max_tokens=6)
    both.submit("a", PROMPT[:8])
    while not both.output("a"):
        both.turn()
    both.submit("b", [9, *PROMPT[:7]])
    both.submit("c", [10, *PROMPT])
    return both, len(both.engine.batches)


def test_both_worker_overlaps_prefills_while_nothing_is_decoded() -> None:
    both = Both(max_tokens=3)
    both.submit("a", PROMPT)
    both.scheduler.step()
    both.scheduler.step()
    assert (len(both.engine.batches), both.engine.num_launched) == (2, 2)
    both.run()
    assert both.output("a") == expected_tokens(PROMPT, 3)


def test_prompt_joins_the_running_decode_steps_at_once() -> None:
    both, num_before = two_come_while_one_is_decoded()
    both.run()
    assert both.engine.batches[num_before : num_before + 2] == [("prefill", [8]), ("decode", [1, 1])]
    for name, prompt in (("a", PROMPT[:8]), ("b", [9, *PROMPT[:7]]), ("c", [10, *PROMPT])):
        assert both.output(name) == expected_tokens(prompt, 6)


def test_local_decode_does_not_wait_for_the_next_prompt() -> None:
    both = Both(max_tokens=3)
    both.submit("a", PROMPT[:8])
    both.submit("b", [9, *PROMPT[:7]])
    both.scheduler.step()
    both.scheduler.step()
    # The second prompt waits for the launch of the first one's decode step.
    assert both.engine.batches == [("prefill", [8])]
    both.run()
    assert both.engine.batches[1:3] == [("decode", [1]), ("prefill", [8])]
    assert both.output("b") == expected_tokens([9, *PROMPT[:7]], 3)


def test_decode_tokens_do_not_wait_for_the_next_prompt() -> None:
    both = Both(max_tokens=6)
    both.submit("a", PROMPT[:8])
    while len(both.output("a")) < 3:
        both.turn()
    assert both.engine.num_launched == 1
    num_known = len(both.output("a"))
    both.submit("b", [9, *PROMPT[:7]])
    both.scheduler.step()
    assert (both.engine.num_launched, len(both.output("a"))) == (2, num_known)
    both.engine.run_next()
    assert both.scheduler.step()
    assert (both.engine.num_launched, len(both.output("a"))) == (1, num_known + 1)
    assert both.engine.batches[-1] == ("prefill", [8])
    both.run()
    assert both.output("a") == expected_tokens(PROMPT[:8], 6)


def test_decode_step_runs_while_the_next_prompt_is_prepared() -> None:
    both, num_before = two_come_while_one_is_decoded()
    while len(both.engine.batches) < num_before + 2:
        both.turn()
    assert both.engine.batches[num_before:] == [("prefill", [8]), ("decode", [1, 1])]
    assert both.engine.num_launched == 1
    both.scheduler.step()
    assert [mode for mode, _ in both.engine.batches[num_before:]] == ["prefill", "decode", "prefill"]
    assert both.engine.num_launched == 2
    both.run()
