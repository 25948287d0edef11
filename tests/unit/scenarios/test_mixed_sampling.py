"""In mixed forward passes, each request's sampling gives the same tokens as alone."""

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.output import ForwardOutput
from tandem.messages import Finished, FirstToken, Progress, PromptScored, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import EOS_TOKEN_IDS, VOCAB_SIZE, save_tiny_model
from tests.fakes.asynchronous import make_asynchronous
from tests.fakes.stand_in import stands_in_for

NUM_REQUESTS = 18
TIMEOUT_S = 30.0
WORDS = LLMatcher.grammar_from_regex("[a-z]+( [a-z]+)*")
ASKED: Sequence[dict[str, Any]] = (
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "logit_bias": ((5, 4.0), (9, -50.0))},
    {"stop_token_ids": tuple(EOS_TOKEN_IDS), "min_tokens": 6, "frequency_penalty": 1.0},
    {"stop_token_ids": tuple(EOS_TOKEN_IDS), "grammar": WORDS, "temperature": 0.7},
    {"stop_token_ids": tuple(EOS_TOKEN_IDS), "grammar": WORDS, "repetition_penalty": 1.2},
    {"num_prompt_logprobs": 0},
)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class Answers(dict[str, Answer]):
    def take(self, message: WorkerMessage) -> None:
        if isinstance(message, FirstToken):
            self._add(message.request_id, message.index, (message.token_id,), message.logprobs)
            self[message.request_id].finish_reason = message.finish_reason
        elif isinstance(message, Tokens):
            for event in message.events:
                self._add(event.request_id, event.index, event.token_ids, event.logprobs)
        elif isinstance(message, PromptScored):
            self[message.request_id].prompt_logprobs += array("f", message.logprobs.logprobs)
        elif isinstance(message, Finished):
            self[message.request_id].finish_reason = message.finish_reason
        else:
            assert isinstance(message, Progress), message

    def _add(self, request_id: str, index: int, token_ids: Sequence[int], logprobs: Sequence[Any]) -> None:
        answer = self[request_id]
        num_known = len(answer.token_ids) - index
        assert num_known >= 0
        answer.token_ids += token_ids[num_known:]
        answer.logprobs += [entry.logprob for entry in logprobs[num_known:]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture
def engine(model_path: Path) -> Iterator[Engine]:
    config = EngineConfig(str(model_path), num_pages=200, num_threads=1, mixed_steps=True)
    engine = build_engine(config, "mixed-sampling", lambda doing: None)
    yield engine
    engine.pool.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_tokens_match_solo_runs(overlaps: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    for number in range(NUM_REQUESTS):
        prompt_ids = rng.choices(range(VOCAB_SIZE - len(EOS_TOKEN_IDS)), k=rng.randint(1, 60))
        asked = {"seed": rng.getrandbits(32), "num_logprobs": 0, **ASKED[number % len(ASKED)]}
        requests[f"r{number}"] = prompt_ids, SamplingParams(rng.randint(8, 20), **asked)
    alone, together = Answers(), Answers()
    for name, (prompt_ids, sampling) in requests.items():
        alone[name] = Answer()
        worker = LocalWorker(engine, PrefillConfig(), DecodeConfig(), alone.take)
        worker.submit(name, prompt_ids, sampling)
        worker.run_until(lambda answer=alone[name]: bool(answer.finish_reason), TIMEOUT_S)
    waiting: list[tuple[str, bool]] = []
    forward = Engine.forward

    @stands_in_for(Engine.forward)
    def seen(engine: Engine, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        waiting.append((batch.mode, batch.waits_for_tokens))
        return forward(engine, batch, meanwhile)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "forward", seen)
        if overlaps:
            make_asynchronous(patch)
        worker = LocalWorker(engine, PrefillConfig(16), DecodeConfig(8), together.take)
        for name, (prompt_ids, sampling) in requests.items():
            together[name] = Answer()
            worker.submit(name, prompt_ids, sampling)
            for _ in range(3):
                worker.step()
        worker.run_until(lambda: all(answer.finish_reason for answer in together.values()), TIMEOUT_S)
    assert waiting.count(("mixed", overlaps)) > 10
    for name, answer in together.items():
        assert (answer.token_ids, answer.finish_reason) == (alone[name].token_ids, alone[name].finish_reason)
        assert answer.logprobs == pytest.approx(alone[name].logprobs, abs=1e-3)
        assert answer.prompt_logprobs == pytest.approx(alone[name].prompt_logprobs, abs=1e-3)
        asks = requests[name][1].num_prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == (len(requests[name][0]) - 1 if asks else 0)
