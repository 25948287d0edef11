"""Prompt logprobs over real schedulers and caches: cached prefixes are recomputed, and no superfluous page stays."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.messages import FirstToken, PromptScored, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE, save_tiny_model
from tests.fakes.engine import expected_tokens
from tests.fakes.workers import WorkerPair
from tests.unit.prefill_worker.test_scheduler import make_pair

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    engine = build_engine(EngineConfig(str(model_path), num_pages=64, num_threads=1), "asked", lambda doing: None)
    yield engine
    engine.pool.close()


class Both:
    """A worker of role both that gets one request after the other."""

    def __init__(self, engine: Engine, chunk_size: int) -> None:
        self.messages: list[Any] = []
        prefill = PrefillConfig(chunk_size=chunk_size)
        self.worker = LocalWorker(engine, prefill, DecodeConfig(), self.messages.append)
        self._number = 0

    def ask(self, prompt: list[int], num_top: int | None, output_ids: tuple[int, ...] = ()) -> list[float]:
        self.messages.clear()
        self._number += 1
        sampling = SamplingParams(4, num_prompt_logprobs=num_top)
        self.worker.submit(f"r{self._number}", prompt, sampling, output_ids=output_ids)
        self.worker.run_until(lambda: any(isinstance(m, FirstToken) for m in self.messages), TIMEOUT_S)
        kinds = [type(message) for message in self.messages if isinstance(message, PromptScored | FirstToken)]
        assert kinds == [PromptScored] * (len(kinds) - 1) + [FirstToken]
        parts = [message.logprobs for message in self.messages if isinstance(message, PromptScored)]
        return [value for part in parts for value in array("f", part.logprobs)]

    @property
    def cached_len(self) -> int:
        return next(m.cached_len for m in self.messages if isinstance(m, FirstToken))


@pytest.mark.parametrize("chunk_size", [512, 24])
def test_they_are_the_same_cold_cached_and_on_a_later_attempt(
    engine: Engine, model_path: Path, chunk_size: int
) -> None:
    prompt = torch.randint(0, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)(torch.tensor([prompt])).logits[0]
    rows = torch.log_softmax(logits, dim=-1)
    expected = pytest.approx([float(rows[i - 1, prompt[i]]) for i in range(1, 100)], abs=2e-5)
    both = Both(engine, chunk_size)
    assert both.ask(prompt, 2) == expected, "cold"
    assert both.ask(prompt, None) == []
    assert both.cached_len == 96, "what was computed for the first is there for others"
    assert both.ask(prompt, 0) == expected, "cached"
    assert both.cached_len == 0
    assert both.ask(prompt, 20, output_ids=(7, 8)) == expected, "an earlier attempt has put out two tokens"
    both.worker.run_until(lambda: not both.worker.scheduler.stats().num_running, TIMEOUT_S)
    assert both.worker.scheduler.check_integrity() == ""
    stats = both.worker.scheduler.stats()
    # The full pages of 100 tokens, and possibly of 4 more.
    assert stats.num_locked_pages == 0 and stats.num_cached_pages == 6, "the prefix is there once"


def scored(pair: WorkerPair, request_id: str) -> list[float]:
    parts = [m.logprobs for m in pair.p.outbox.of(PromptScored) if m.request_id == request_id]
    return [value for part in parts for value in array("f", part.logprobs)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prefill_and_decode_workers_with_a_cached_prefix(asynchronous: bool) -> None:
    pair = make_pair(chunk_size=10, asynchronous=asynchronous)
    prompt = list(range(33))
    pair.submit("warm", prompt)
    pair.run()
    num_computed = pair.p.engine.counters.prompt_tokens_computed
    num_shipped = pair.p.scheduler.stats().shipped[0].num_pages
    for name in ("a", "b"):
        pair.submit(name, prompt, num_prompt_logprobs=1)
    # A request without logprobs uses the cached prefix beside them.
    pair.submit("c", [*prompt, 5])
    pair.run()
    for name in ("a", "b"):
        assert scored(pair, name) == [-float(position) for position in range(1, 33)]
        assert pair.output(name) == expected_tokens(prompt, 5)
    assert pair.output("c") == expected_tokens([*prompt, 5], 5)
    assert scored(pair, "c") == []
    assert pair.p.engine.counters.prompt_tokens_computed - num_computed == 33 + 33 + 2
    # The decode worker has the prefix's full pages, so only each request's last page is shipped.
    assert pair.p.scheduler.stats().shipped[0].num_pages - num_shipped == 3
    pair.check_idle()
    assert [m.cached_len for m in pair.p.outbox.of(FirstToken)] == [0, 0, 0, 32]
    assert pair.d.outbox.of(Tokens)


def test_scored_request_never_waits_but_others_wait_for_its_pages() -> None:
    pair = make_pair(chunk_size=16)
    prefix = list(range(40))
    pair.submit("plain", [*prefix, 1])
    pair.submit("asks", [*prefix, 2], num_prompt_logprobs=0)
    pair.submit("waits", [*prefix, 3])
    pair.run()
    assert pair.p.engine.counters.prompt_tokens_computed == 41 + 41 + 1
    assert [lens for _, lens in pair.p.engine.batches][:3] == [[16], [16], [9, 7]], "it takes what is left of a forward"
    assert scored(pair, "asks") == [-float(position) for position in range(1, 41)]
    pair.check_idle()


def test_abort_during_scoring_leaves_no_pages() -> None:
    pair = make_pair(chunk_size=8, asynchronous=True)
    pair.submit("a", list(range(40)), num_prompt_logprobs=3)
    for _ in range(3):
        pair.turn()
    pair.abort("a")
    pair.run()
    assert not pair.p.outbox.of(FirstToken)
    pair.check_idle()
