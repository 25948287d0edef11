"""Drafts by a model beside prompts, cancels and give-backs: every output is unchanged, and no page is left behind."""

import random
from collections.abc import Sequence

import pytest

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.draft_depth import DraftDepth
from tandem.engine.draft_models.draft_maker import DraftMaker
from tandem.engine.token_sequence import TokenSequence
from tandem.messages import Abort, Finished, FirstToken, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tests.fakes.engine import FakeEngine, expected_tokens

PAGE_SIZE = 4
NUM_REQUESTS = 12
MAX_TURNS = 8000


class Maker(DraftMaker):
    """Most drafts are right."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def make(self, sequences: Sequence[TokenSequence], num_drafts: Sequence[int]) -> list[list[int]]:
        made = []
        for sequence, count in zip(sequences, num_drafts, strict=True):
            assert not sequence.num_pending and sequence.cached_len == len(sequence.token_ids) - 1
            assert 0 < count <= len(sequence.page_ids) * PAGE_SIZE - sequence.cached_len - 1
            drafts = expected_tokens(sequence.token_ids, count)
            made.append([draft if self._rng.random() < 0.8 else 7 for draft in drafts])
        return made


class Worker:
    """A worker of role both, and requests of one attempt each."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self._prompts = {f"r{number}": rng.choices(range(900), k=rng.randint(1, 20)) for number in range(NUM_REQUESTS)}
        self._outputs = {name: expected_tokens(prompt, rng.randint(1, 30)) for name, prompt in self._prompts.items()}
        self._found: dict[str, list[int]] = {name: [] for name in self._prompts}
        self._whole: set[str] = set()
        self._cut: set[str] = set()
        self._engine = FakeEngine(
            rng.choice((200, 24)), PAGE_SIZE, asynchronous=rng.random() < 0.8, min_mixed=rng.choice((1, 2**31))
        )
        self._engine.draft_maker = Maker(rng)
        self._engine.max_drafted_rows = rng.choice((6, 12, 10**9))
        config = DecodeConfig(rng.choice((2, 8)), speculation="mtp")
        self._worker = LocalWorker(self._engine, PrefillConfig(8), config, self._take)

    def run(self) -> int:
        """Returns the accepted drafts."""
        rng, scheduler = self._rng, self._worker.scheduler
        waiting = list(self._prompts)
        for _ in range(MAX_TURNS):
            if len(self._whole | self._cut) == NUM_REQUESTS:
                break
            if waiting and rng.random() < 0.3:
                self._submit(waiting.pop())
            elif rng.random() < 0.01 and (live := [*{*self._prompts} - self._whole - self._cut - {*waiting}]):
                self._cut.add(name := rng.choice(sorted(live)))
                scheduler.receive(FromRouter(Abort(name, 0)))
            self._turn(1 if rng.random() < 0.5 else 0)
        # A step too many may be in flight.
        for _ in range(3):
            self._turn(self._engine.num_launched)
        assert len(self._whole | self._cut) == NUM_REQUESTS
        for name, found in self._found.items():
            output = self._outputs[name]
            assert found == (output if name in self._whole else output[: len(found)])
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_locked_pages) == (0, 0)
        [drafted] = stats.drafted
        return drafted.num_accepted

    def _submit(self, name: str) -> None:
        output = self._outputs[name]
        sampling = SamplingParams(len(output) + 5, stop_token_ids=(output[-1],))
        self._outputs[name] = output[: output.index(output[-1]) + 1]
        self._worker.submit(name, self._prompts[name], sampling)

    def _turn(self, num_passes: int) -> None:
        for _ in range(min(num_passes, self._engine.num_launched)):
            self._engine.run_next()
        self._worker.scheduler.step()
        assert self._worker.scheduler.check_integrity() == ""

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, FirstToken):
            self._found[message.request_id].append(message.token_id)
            self._whole.update([message.request_id] if message.finish_reason else [])
        elif isinstance(message, Tokens):
            for event in message.events:
                output = self._found[event.request_id]
                output += event.token_ids[len(output) - event.index :]
        elif isinstance(message, Finished):
            self._whole.add(message.request_id)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.slow)], ids=["few", "many"])
def test_outputs_are_unchanged_and_no_page_is_left(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = random.Random(0)

    def choose(self: DraftDepth, requests: Sequence[tuple[float, int]], num_requests: int, num_context: int) -> int:
        return min(depths.randint(0, 4), max((most for _, most in requests), default=0))

    monkeypatch.setattr(DraftDepth, "choose", choose)
    for seed in seeds:
        assert Worker(seed).run() > 0
