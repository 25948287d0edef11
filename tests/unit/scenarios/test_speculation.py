"""Speculation changes no token: random requests with and without it, on a CPU engine in float32."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.messages import Drafted, Finished, FirstToken, GaveBack, Progress, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import EOS_TOKEN_IDS, VOCAB_SIZE, save_tiny_model
from tests.fakes.scripted_drafter import scripted

# Of requests that need a few hundred.
MAX_STEPS = 5_000
PAGE_SIZE = 4
NUM_PAGES = 200
# More than a policy takes.
MAX_DRAFTS = 12
ENDS = tuple(EOS_TOKEN_IDS)
GRAMMARS = (
    LLMatcher.grammar_from_regex("[a-z]+( [a-z]+)*"),
    LLMatcher.grammar_from_json_schema({"type": "array", "items": {"enum": ["ab", "abc", 7]}}),
    LLMatcher.grammar_from_regex("(yes|no){1,6}"),
)


@dataclass
class Request:
    """
    Attributes:
        given_up: attempts to abort, each once the output has this length.
        num_accepted: drafts of the last attempt.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    given_up: list[int] = field(default_factory=list)
    attempt: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    num_accepted: int = 0

    def take(self, index: int, token_ids: Sequence[int], logprobs: Sequence[Any]) -> None:
        num_known = len(self.token_ids) - index
        assert num_known >= 0 and not self.finish_reason
        assert not self.sampling.num_logprobs or len(logprobs) == len(token_ids)
        self.token_ids += token_ids[num_known:]
        self.logprobs += [entry.logprob for entry in logprobs[num_known:]]


class Requests(dict[str, Request]):
    """Acts as a router: starts another attempt at a request that ended early.

    Attributes:
        num_given_back: by the worker.
    """

    num_given_back = 0

    def run(self, engine: Engine, decode: DecodeConfig, num_pages: int) -> Sequence[Drafted]:
        worker = LocalWorker(engine, PrefillConfig(16), decode, self._take)
        cache = worker.scheduler._cache
        # The others are in use for as long as the requests run.
        withheld = cache.acquire_pages((), (NUM_PAGES - num_pages) * PAGE_SIZE, max_cached_len=0)
        assert withheld is not None
        self._again = list(self)
        self._num_steps = 0
        while any(not request.finish_reason for request in self.values()):
            again, self._again = self._again, []
            for name in again:
                request = self[name]
                worker.submit(
                    name,
                    request.prompt_ids,
                    request.sampling,
                    attempt=request.attempt,
                    output_ids=request.token_ids,
                    arrival_ns=list(self).index(name) + 1,
                )
            self._run_until_news(worker)
            for name, request in self.items():
                if request.given_up and len(request.token_ids) >= request.given_up[0]:
                    request.given_up.pop(0)
                    if not request.finish_reason and name not in self._again:
                        worker.abort(name, request.attempt)
                        self._start_again(name)
        cache.release_pages(withheld)
        worker.step()
        assert worker.scheduler.check_integrity() == ""
        stats = worker.scheduler.stats()
        assert (stats.num_locked_pages, stats.num_leased_pages, stats.num_running) == (0, 0, 0)
        return stats.drafted

    def _run_until_news(self, worker: LocalWorker) -> None:
        """Idle turns, which wait for grammars, are no steps."""
        while not self._has_news():
            self._num_steps += worker.step()
            assert self._num_steps <= MAX_STEPS, worker.scheduler.stats()

    def _has_news(self) -> bool:
        if self._again or all(request.finish_reason for request in self.values()):
            return True
        return any(r.given_up and len(r.token_ids) >= r.given_up[0] for r in self.values())

    def _start_again(self, name: str) -> None:
        self[name].attempt += 1
        self._again.append(name)

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, FirstToken):
            request = self[message.request_id]
            if message.attempt == request.attempt:
                request.take(message.index, (message.token_id,), message.logprobs)
                request.finish_reason = message.finish_reason
        elif isinstance(message, Tokens):
            for event in message.events:
                request = self[event.request_id]
                if event.attempt == request.attempt:
                    request.take(event.index, event.token_ids, event.logprobs)
        elif isinstance(message, Finished):
            request = self[message.request_id]
            if message.attempt == request.attempt:
                assert message.num_output_tokens == len(request.token_ids)
                request.finish_reason = message.finish_reason
                request.num_accepted = message.num_accepted
        elif isinstance(message, GaveBack):
            if message.attempt == self[message.request_id].attempt:
                self.num_given_back += 1
                self._start_again(message.request_id)
        else:
            assert isinstance(message, Progress), message


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    config = EngineConfig(str(path), num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_threads=1, mixed_steps=True)
    engine = build_engine(config, "speculation", lambda doing: None)
    engine.max_drafts = MAX_DRAFTS
    yield engine
    engine.close()


def draw_weights(engine: Engine, seed: int) -> None:
    """Makes another random model of the engine's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for name, parameter in engine.model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    engine.model.loaded()


def random_sampling(rng: random.Random) -> SamplingParams:
    asked: dict[str, Any] = {"seed": rng.getrandbits(32), "num_logprobs": rng.choice((0, 3))}
    if rng.random() < 0.6:
        asked |= {"temperature": rng.choice((0.3, 0.8, 1.2)), "top_p": rng.choice((1.0, 0.9))}
        asked |= {"top_k": rng.choice((0, 20)), "min_p": rng.choice((0.0, 0.05))}
    if rng.random() < 0.4:
        asked |= {"repetition_penalty": rng.choice((1.0, 1.3)), "frequency_penalty": rng.choice((0.0, 0.7))}
        asked |= {"presence_penalty": rng.choice((0.0, 0.5)), "logit_bias": ((5, 4.0), (9, -50.0))}
    if rng.random() < 0.5:
        # Also frequent tokens, so that outputs stop within bursts.
        asked["stop_token_ids"] = (*ENDS, *rng.sample(range(VOCAB_SIZE - len(ENDS)), rng.choice((0, 10))))
        kind = rng.random()
        if kind < 0.5:
            asked |= {"grammar": rng.choice(GRAMMARS), "stop_token_ids": ENDS}
        elif kind < 0.7:
            asked["allowed_token_ids"] = tuple(range(40, 80))
    max_tokens = rng.choice((1, 2, 3, 8, 14, 30))
    if "stop_token_ids" in asked and rng.random() < 0.4:
        asked["min_tokens"] = rng.randint(1, max_tokens)
    return SamplingParams(max_tokens, **asked)


def drafts_of(outputs: Sequence[list[int]], rng: random.Random, token_ids: Sequence[int], most: int) -> list[int]:
    """Returns a part of the right tokens, then wrong ones, or too many, or none."""
    known = next((ids for ids in outputs if ids[: len(token_ids)] == token_ids), [])
    right = known[len(token_ids) :][: rng.choice((0, 0, 1, 2, most, most))]
    wrong = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, most))]
    return [*right, *wrong][:most]


def check(engine: Engine, seed: int) -> tuple[int, int]:
    """Returns the accepted drafts and the give-backs."""
    rng = random.Random(seed)
    draw_weights(engine, seed)
    without, speculating = Requests(), Requests()
    for number in range(rng.randint(1, 6)):
        pattern = rng.choices(range(VOCAB_SIZE - len(ENDS)), k=rng.randint(1, 12))
        prompt_ids = (pattern * 4)[: rng.randint(1, 40)]
        sampling = random_sampling(rng)
        given_up = sorted(rng.sample(range(1, 31), rng.choice((0, 0, 1, 2))))
        without[f"r{number}"] = Request(prompt_ids, sampling)
        speculating[f"r{number}"] = Request(prompt_ids, sampling, given_up)
    without.run(engine, DecodeConfig(), 190)
    outputs = [request.prompt_ids + request.token_ids for request in without.values()]
    max_drafts, max_batch_size = rng.choice((1, 2, 3, 4, 7, MAX_DRAFTS)), rng.choice((2, 8))
    largest = max(-(-(len(r.prompt_ids) + r.sampling.max_tokens) // PAGE_SIZE) for r in without.values())
    num_pages = rng.choice((190, largest + 2, 2 * largest))
    if rng.random() < 0.2:
        config = DecodeConfig(max_batch_size, speculation=("ngram", "auto")[seed % 2])
        [drafted] = speculating.run(engine, config, num_pages)
    else:
        with scripted(lambda ids, most: drafts_of(outputs, rng, ids, most), max_drafts) as path:
            config = DecodeConfig(max_batch_size, speculation=path)
            [drafted] = speculating.run(engine, config, num_pages)
    assert 0 <= drafted.num_accepted <= drafted.num_tokens
    for name, request in speculating.items():
        alone = without[name]
        told = (seed, name, request.sampling)
        assert (request.token_ids, request.finish_reason) == (alone.token_ids, alone.finish_reason), told
        assert request.logprobs == pytest.approx(alone.logprobs, abs=1e-4), told
    return drafted.num_accepted, speculating.num_given_back


def check_many(engine: Engine, seeds: Sequence[int]) -> None:
    results = [check(engine, seed) for seed in seeds]
    assert sum(accepted for accepted, _ in results) > len(seeds)
    assert sum(given_back for _, given_back in results) > len(seeds) // 20


def test_tokens_are_those_without_speculation(engine: Engine) -> None:
    check_many(engine, range(16))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_of_thousands_of_requests_are_those_without_speculation(engine: Engine) -> None:
    check_many(engine, range(1000, 2000))
