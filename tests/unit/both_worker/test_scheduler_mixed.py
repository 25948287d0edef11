"""Mixed steps, composed while the previous one runs, match separate forward passes."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.batch import Batch
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.output import ForwardOutput
from tandem.messages import Abort, Admit, Finished, FirstToken, GaveBack, Prefill, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.recording import DEVICE, Recorder
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.workers import ListOutbox

PAGE_SIZE = 4
CHUNK_SIZE = 8
PROMPT = list(range(30))
STEP_S = 0.02


class Worker:
    """A both worker whose device runs on command."""

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        num_pages: int = 64,
        min_mixed: int = 1,
        chunk_size: int = CHUNK_SIZE,
        max_batch_size: int = 64,
        step_s: float = 0.0,
    ) -> None:
        self.clock, self.outbox = FakeClock(), ListOutbox()
        self.engine = FakeEngine(num_pages, PAGE_SIZE, asynchronous=asynchronous, min_mixed=min_mixed, step_s=step_s)
        self.cache = CacheManager(num_pages, PAGE_SIZE)
        self.recorder = Recorder()
        self.scheduler = make_both_scheduler(
            "both",
            self.engine,
            self.cache,
            self.outbox,
            PrefillConfig(chunk_size, min_shared_tokens=PAGE_SIZE),
            DecodeConfig(max_batch_size),
            recorder=self.recorder,
            clock=self.clock,
        )
        self._arrivals = 0

    @property
    def modes(self) -> list[str]:
        return [mode for mode, _ in self.engine.batches]

    def submit(self, name: str, prompt: list[int], max_tokens: int = 6, attempt: int = 0, **sampling: Any) -> None:
        self._arrivals += 1
        params, prompt_ids = SamplingParams(max_tokens, **sampling), tuple(prompt)
        admit = Admit(name, attempt, prompt_ids, (), params, 1e9, self._arrivals)
        self.scheduler.receive(FromRouter(admit))
        self.scheduler.receive(FromRouter(Prefill(name, attempt, prompt_ids, (), params, "both", self._arrivals)))

    def abort(self, name: str) -> None:
        self.scheduler.receive(FromRouter(Abort(name, 0)))

    def step(self) -> bool:
        worked = self.scheduler.step()
        assert self.scheduler.check_integrity() == ""
        assert not self.engine.pages_in_use & set(self.cache._allocator.free_pages())
        return worked

    def turn(self) -> bool:
        """Run a step or a forward pass; return whether there was either."""
        if self.step():
            return True
        if self.engine.num_launched:
            self.engine.run_next()
            return True
        return False

    def run(self) -> None:
        """Run until idle, when every page is free or cached."""
        while self.turn():
            pass
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_queued, stats.num_locked_pages, stats.num_leased_pages) == (0, 0, 0, 0)
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_total_pages

    def output(self, name: str) -> list[int]:
        events = [e for m in self.outbox.of(Tokens) for e in m.events if e.request_id == name]
        return [token_id for e in events for token_id in e.token_ids]


def decoding(prompt: list[int] = PROMPT[:8], max_tokens: int = 40, **kwargs: Any) -> Worker:
    """Return a worker that decodes `a`, with a step in flight if steps overlap."""
    worker = Worker(**kwargs)
    worker.submit("a", prompt, max_tokens)
    while len(worker.output("a")) < 2:
        worker.turn()
    worker.engine.batches.clear()
    return worker


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompts_are_computed_in_one_forward_with_the_steps_beside_them(asynchronous: bool) -> None:
    worker = decoding(asynchronous=asynchronous)
    worker.submit("b", [9, *PROMPT])
    worker.run()
    # The prompt's 31 tokens in chunks of 8, each with a token of `a`; then both in every step.
    assert worker.engine.batches[:5] == [*[("mixed", [1, 8])] * 3, ("mixed", [1, 7]), ("decode", [1, 1])]
    assert "prefill" not in worker.modes
    assert worker.output("a") == expected_tokens(PROMPT[:8], 40)
    assert worker.output("b") == expected_tokens([9, *PROMPT], 6)


def test_mixed_step_is_launched_while_the_previous_one_runs() -> None:
    worker = decoding()
    seen: list[tuple[int, int]] = []
    run_next = worker.engine.run_next

    def run() -> None:
        seen.append((worker.engine.num_launched, len(worker.output("a"))))
        run_next()

    worker.engine.run_next = run  # type: ignore[method-assign]
    num_known = len(worker.output("a"))
    worker.submit("b", [9, *PROMPT])
    for _ in range(4):
        worker.step()
    # Each runs behind the previous one, whose token is sent at its launch.
    assert seen == [(2, num_known + i) for i in range(4)]
    assert worker.modes == ["mixed"] * 4 and worker.engine.num_launched == 1
    worker.run()


def test_completed_prompt_joins_the_next_step() -> None:
    worker = decoding()
    worker.submit("b", [9, *PROMPT[:5]])
    worker.submit("c", [10, *PROMPT])
    assert worker.step()
    assert worker.engine.batches == [("mixed", [1, 6, 2])]
    # The device idles only to wait for the request that continues here.
    assert not worker.step() and worker.engine.num_launched == 1
    assert worker.scheduler.next_deadline() is not None
    worker.engine.run_next()
    assert worker.step()
    assert worker.engine.batches[1:] == [("mixed", [1, 1, 8])]
    worker.run()
    for name, prompt in (("b", [9, *PROMPT[:5]]), ("c", [10, *PROMPT])):
        assert worker.output(name) == expected_tokens(prompt, 6)


def test_mixed_step_is_recorded_once_with_all_requests() -> None:
    worker = decoding()
    worker.recorder.start()
    worker.submit("b", [9, *PROMPT[:5]])
    worker.submit("c", [10, *PROMPT[:12]])
    worker.run()
    device = [kept for kept in worker.recorder.stop().take(1000) if kept.track == DEVICE]
    assert [(kept.name, sum(kept.request_tokens), kept.numbers["batch_size"]) for kept in device[:3]] == [
        # The second one is also the first step of b.
        ("mixed", 8, 1),
        ("mixed", 8 + 1, 2),
        ("mixed", 3, 2),
    ]
    assert list(device[1].request_ids) == ["c", "b"]
    assert len([kept for kept in device if kept.name == "mixed"]) == worker.modes.count("mixed")


def test_short_prompt_is_computed_alone() -> None:
    worker = decoding(min_mixed=5)
    worker.submit("b", [9, *PROMPT[:11]])
    worker.run()
    assert worker.engine.batches[:3] == [("mixed", [1, 8]), ("prefill", [4]), ("decode", [1, 1])]
    assert worker.output("b") == expected_tokens([9, *PROMPT[:11]], 6)


def test_prompts_do_not_wait_for_requests_awaiting_their_last_token() -> None:
    worker = decoding(max_tokens=4)
    worker.submit("b", [9, *PROMPT[:3]])
    worker.run()
    assert worker.output("a") == expected_tokens(PROMPT[:8], 4)
    assert worker.output("b") == expected_tokens([9, *PROMPT[:3]], 6)


def test_a_cached_prefix_is_not_computed_again_beside_a_step() -> None:
    worker = decoding()
    worker.submit("b", [*PROMPT[:8], 500, 501])
    worker.run()
    assert worker.engine.batches[0] == ("mixed", [1, 2])
    assert worker.output("b") == expected_tokens([*PROMPT[:8], 500, 501], 6)


def test_forward_of_aborted_requests_delays_no_other_request() -> None:
    worker = decoding()
    worker.submit("b", [9, *PROMPT[:7]])
    worker.step()
    worker.engine.run_next()
    worker.step()
    assert worker.modes[-1] == "decode"
    worker.submit("c", [10, *PROMPT])
    worker.step()
    assert worker.modes[-1] == "mixed" and worker.engine.num_launched == 1
    for name in "ab":
        worker.abort(name)
    worker.step()
    # The rest of the prompt runs behind it, and the thread does not wait for the device.
    assert worker.modes[-1] == "prefill" and worker.engine.num_launched == 2
    worker.abort("c")
    for _ in range(3):
        assert not worker.step()
        deadline = worker.scheduler.next_deadline()
        assert deadline is not None and deadline > worker.clock.now
    assert worker.engine.num_launched == 2
    worker.submit("d", PROMPT[:9])
    worker.run()
    assert worker.output("d") == expected_tokens(PROMPT[:9], 6)


def test_ends_are_reported_before_the_next_forward_is_composed() -> None:
    worker = decoding(step_s=STEP_S)
    worker.submit("b", [9, *PROMPT])
    worker.clock.advance(STEP_S)
    worker.step()
    assert worker.modes[-1] == "mixed"
    num_known = len(worker.output("a"))
    known_at_launch: list[int] = []
    forward = worker.engine.forward

    def counted(batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        known_at_launch.append(len(worker.output("a")))
        return forward(batch, meanwhile)

    worker.engine.forward = counted  # type: ignore[method-assign]
    worker.engine.run_next()
    worker.step()
    assert known_at_launch == [num_known + 1]
    worker.run()


@pytest.mark.parametrize("num_turns", range(0, 14, 2))
@pytest.mark.parametrize("name", ["a", "b"])
def test_aborted_request_frees_pages_after_its_forwards(name: str, num_turns: int) -> None:
    worker = decoding()
    worker.submit("b", [9, *PROMPT], 20)
    for _ in range(num_turns):
        worker.turn()
    worker.abort(name)
    assert worker.scheduler.check_integrity() == ""
    assert not worker.engine.pages_in_use & set(worker.cache._allocator.free_pages())
    worker.submit("c", [*PROMPT[:8], *range(50, 70)])
    worker.run()
    prompts = {"a": (PROMPT[:8], 40), "b": ([9, *PROMPT], 20)}
    for other, (prompt, max_tokens) in prompts.items():
        whole = expected_tokens(prompt, max_tokens)
        assert worker.output(other) == (whole[: len(worker.output(other))] if other == name else whole)
    assert worker.output("c") == expected_tokens([*PROMPT[:8], *range(50, 70)], 6)


def test_request_given_back_beside_a_prompt_resumes_from_its_tokens() -> None:
    worker = Worker(num_pages=12)
    prompts = {name: [number, *PROMPT[:9]] for number, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        worker.submit(name, prompt, 20)
    attempts = dict.fromkeys(prompts, 0)
    num_seen = 0
    while worker.turn() or num_seen < len(worker.outbox.of(GaveBack)):
        for message in worker.outbox.of(GaveBack)[num_seen:]:
            num_seen += 1
            attempts[message.request_id] += 1
            worker.submit(message.request_id, prompts[message.request_id], 20, attempts[message.request_id])
    assert num_seen and "mixed" in worker.modes
    assert {m.request_id for m in worker.outbox.of(Finished)} == set(prompts)
    for name, prompt in prompts.items():
        events = [e for m in worker.outbox.of(Tokens) for e in m.events]
        last = [e for e in events if (e.request_id, e.attempt) == (name, attempts[name])]
        assert [token_id for e in last for token_id in e.token_ids] == expected_tokens(prompt, 20)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_workload_gives_every_request_its_tokens(seed: int, asynchronous: bool) -> None:
    rng = random.Random(seed)
    worker = Worker(
        asynchronous=asynchronous,
        num_pages=rng.choice((24, 200)),
        min_mixed=rng.choice((1, 3, 5)),
        chunk_size=rng.choice((5, 16)),
        max_batch_size=rng.choice((2, 8)),
    )
    prefixes = [[7, *range(n)] for n in (3, 8, 17)]
    requests: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for number in range(60):
        if rng.random() < 0.35:
            name = f"r{number}"
            prompt = rng.choice(prefixes) + [rng.randrange(900) for _ in range(rng.randint(1, 20))]
            requests[name] = prompt, rng.randint(1, 12)
            worker.submit(name, *requests[name])
        if requests and rng.random() < 0.05:
            name = rng.choice(list(requests))
            aborted.add(name)
            worker.abort(name)
        for _ in range(rng.randint(1, 4)):
            worker.turn()
    worker.run()
    assert "mixed" in worker.modes
    given_back = {m.request_id for m in worker.outbox.of(GaveBack)}
    for name, (prompt, max_tokens) in requests.items():
        if name not in aborted | given_back:
            first = [m.token_id for m in worker.outbox.of(FirstToken) if m.request_id == name]
            assert first + worker.output(name)[1:] == expected_tokens(prompt, max_tokens)
