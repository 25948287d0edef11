"""Streams that speculate move between two workers: transformers confirms tokens and log probabilities."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.decode_worker.config import DecodeConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.messages import Admit, Finished, FirstToken, GaveBack, Move, NotMoved, Prefill, Tokens
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tests.cluster.conftest import VOCAB_SIZE, Oracle, save_tiny_model
from tests.fakes.both_workers import BothWorkers
from tests.fakes.scripted_drafter import scripted
from tests.unit.scenarios.test_speculation import (
    MAX_DRAFTS,
    NUM_PAGES,
    PAGE_SIZE,
    Request,
    Requests,
    drafts_of,
)

ROUTER = "router"
NUM_STREAMS = 6
MAX_TOKENS = 60
TURN_S = 0.01
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.2}
# Of a stream at each turn.
MOVE_CHANCE = 0.25


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@pytest.fixture(scope="module")
def engines(model_dir: Path) -> Iterator[dict[str, Engine]]:
    """Of the two workers."""
    config = EngineConfig(str(model_dir), num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_threads=1, mixed_steps=True)
    engines = {name: build_engine(config, f"moves-{name}", lambda doing: None) for name in ("a", "b")}
    for engine in engines.values():
        engine.max_drafts = MAX_DRAFTS
    yield engines
    for engine in engines.values():
        engine.close()


class Movers(BothWorkers):
    """Acts as the router, and moves streams at random moments."""

    def __init__(self, engines: dict[str, Engine], config: DecodeConfig, requests: Requests, rng: random.Random):
        super().__init__(NUM_PAGES, config=config, engines=engines)
        self.requests = requests
        self.num_moved = 0
        self._rng = rng
        # Workers that decode each stream, and those to which it moves.
        self._places: dict[str, str] = {}
        self._moving: dict[str, str] = {}
        # Attempts whose decode worker has sent tokens: earlier ones do not run there yet.
        self._running: dict[str, int] = {}

    def run_all(self) -> None:
        for name in self.requests:
            self._start(name, *[self._rng.choice("ab")] * 2)
        while not all(request.finish_reason for request in self.requests.values()):
            self.turn()
            # Pages kept for an attempt that does not come are let go after a time.
            self.clock.advance(TURN_S)
            for place, worker in self.workers.items():
                messages, worker.outbox.router = worker.outbox.router, []
                for message in messages:
                    self._take(place, message)
            for name, request in self.requests.items():
                can_move = self._running.get(name) == request.attempt and name not in self._moving
                if can_move and not request.finish_reason and self._rng.random() < MOVE_CHANCE:
                    self._move(name)
        self.run()

    def _start(self, name: str, prefill_at: str, decode_at: str, *, is_move: bool = False) -> None:
        request = self.requests[name]
        self._places[name] = decode_at
        given = tuple(request.prompt_ids), tuple(request.token_ids), request.sampling
        age = list(self.requests).index(name)
        admit = Admit(name, request.attempt, *given, 60.0, age, prefill_worker_id=prefill_at)
        self.workers[decode_at].scheduler.receive(FromRouter(admit))
        prefill = Prefill(name, request.attempt, *given, decode_at, age, is_move=is_move)
        self.workers[prefill_at].scheduler.receive(FromRouter(prefill))

    def _move(self, name: str) -> None:
        request, source = self.requests[name], self._places[name]
        self._moving[name] = destination = "b" if source == "a" else "a"
        known = [*request.prompt_ids, *request.token_ids]
        num_tokens = (len(known) - 1) // PAGE_SIZE * PAGE_SIZE
        copy_id = f"{ROUTER}-copy-{len(known)}-of-{name}"
        admit = Admit(copy_id, 0, tuple(known[:num_tokens]), (), request.sampling, 5.0, copy_of=name)
        self.workers[destination].scheduler.receive(FromRouter(admit))
        move = Move(name, request.attempt, copy_id, destination, num_tokens)
        self.workers[source].scheduler.receive(FromRouter(move))

    def _take(self, place: str, message: Any) -> None:
        if isinstance(message, FirstToken):
            request = self.requests[message.request_id]
            request.take(message.index, (message.token_id,), message.logprobs)
            request.finish_reason = message.finish_reason
        elif isinstance(message, Tokens):
            for event in message.events:
                self.requests[event.request_id].take(event.index, event.token_ids, event.logprobs)
                self._running[event.request_id] = event.attempt
        elif isinstance(message, Finished):
            self.requests[message.request_id].finish_reason = message.finish_reason
        elif isinstance(message, NotMoved):
            self._moving.pop(message.request_id, None)
        elif isinstance(message, GaveBack):
            name = message.request_id
            self.requests[name].attempt += 1
            destination = self._moving.pop(name, place)
            self.num_moved += message.is_move
            self._start(name, place, destination if message.is_move else place, is_move=message.is_move)


def check(engines: dict[str, Engine], oracle: Oracle, seed: int) -> tuple[int, int]:
    """Returns the moves and the accepted drafts."""
    rng = random.Random(seed)
    alone, moving = Requests(), Requests()
    for number in range(NUM_STREAMS):
        prompt_ids = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40))
        drawn: dict[str, Any] = {"seed": rng.getrandbits(32), "temperature": 0.8, "top_p": 0.95} if number % 3 else {}
        sampling = SamplingParams(MAX_TOKENS, **PENALTIES, num_logprobs=0, **drawn)
        for requests in (alone, moving):
            requests[f"{ROUTER}-{number}"] = Request(prompt_ids, sampling)
    alone.run(engines["a"], DecodeConfig(), NUM_PAGES - PAGE_SIZE)
    outputs = [request.prompt_ids + request.token_ids for request in alone.values()]

    def script(token_ids: Sequence[int], most: int) -> list[int]:
        return drafts_of(outputs, rng, token_ids, most)

    with scripted(script, 7) as path:
        movers = Movers(engines, DecodeConfig(speculation=path), moving, rng)
        movers.run_all()
    for name, request in moving.items():
        told = (seed, name, request.attempt)
        assert len(request.token_ids) == MAX_TOKENS
        # Rounding may choose another token than `alone`.
        assert oracle.may_draw(request.prompt_ids, request.token_ids, request.sampling), told
        logprobs = oracle.logits(request.prompt_ids + request.token_ids)[-MAX_TOKENS - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(request.token_ids)[:, None])[:, 0].tolist()
        assert request.logprobs == pytest.approx(expected, abs=1e-4), told
    drafted = [d for worker in movers.workers.values() for d in worker.scheduler.stats().drafted]
    assert sum(d.num_tokens for d in drafted) > sum(d.num_accepted for d in drafted)
    return movers.num_moved, sum(d.num_accepted for d in drafted)


def check_many(engines: dict[str, Engine], oracle: Oracle, seeds: Sequence[int]) -> None:
    results = [check(engines, oracle, seed) for seed in seeds]
    assert sum(num_moved for num_moved, _ in results) > 3 * len(seeds)
    assert sum(num_accepted for _, num_accepted in results) > 50 * len(seeds)


def test_transformers_confirms_moved_streams(engines: dict[str, Engine], oracle: Oracle) -> None:
    check_many(engines, oracle, range(2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_transformers_confirms_hundreds_of_moved_streams(engines: dict[str, Engine], oracle: Oracle) -> None:
    check_many(engines, oracle, range(1000, 1200))
