"""Decode steps with drafts on a GPU: graphs, and tokens with right and wrong drafts."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import NO_SPECULATION, DecodeConfig
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence
from tandem.messages import Finished, FirstToken, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams, TokenLogprobs
from tests.cluster.conftest import VOCAB_SIZE
from tests.fakes.scripted_drafter import scripted
from tests.gpu.engine.test_engine import assert_close
from tests.gpu.random_models import let_count_up, save_latent_model

NUM_PAGES = 200
PAGE_SIZE = 16
MAX_DRAFTS = 7
TIMEOUT_S = 60.0
LATENTS = "latent_triton"
PROMPT_LENS = (5, 33, 16, 90, 1, 48)
SAMPLINGS = (
    SamplingParams(40),
    SamplingParams(40, temperature=1.0, seed=3),
    SamplingParams(40, temperature=0.8, seed=4, top_p=0.9, top_k=50),
    SamplingParams(40, repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParams(40, allowed_token_ids=tuple(range(3, 90))),
    SamplingParams(40, min_tokens=20, stop_token_ids=tuple(range(100, 140))),
)


@pytest.fixture(scope="module")
def latent_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of latents whose tokens rounding does not change. Without experts, which it might."""
    directory = tmp_path_factory.mktemp("models") / "latents"
    save_latent_model(directory, num_dense=2)
    let_count_up(directory)
    return directory


def build(model_dir: Path, *, graphs: int = 16, dtype: str = "bfloat16", backend: str = "auto") -> Engine:
    config = EngineConfig(
        str(model_dir),
        device="cuda",
        dtype=dtype,
        num_pages=NUM_PAGES,
        attention_backend=backend,
        cuda_graph_max_bs=graphs,
        prefill_cuda_graphs=False,
        max_batch_size=16,
        max_drafts=MAX_DRAFTS,
    )
    return build_engine(config, "speculation", lambda doing: None)


def logprobs_of(engine: Engine, num_drafts: Sequence[int]) -> list[float]:
    """Returns the largest log probability behind each token of given texts, in steps of 1 + num_drafts tokens."""
    rng = random.Random(0)
    sequences, texts = [], []
    for number, prompt_len in enumerate(PROMPT_LENS):
        texts.append(rng.choices(range(VOCAB_SIZE), k=prompt_len + 20))
        pages = list(range(10 * number, 10 * number + 10))
        sequences.append(
            TokenSequence(texts[-1][:prompt_len], prompt_len, pages, sampling=SamplingParams(1, num_logprobs=0))
        )
    for sequence in sequences:
        sequence.extend(sequence.remaining_len)
    engine.forward(Batch("prefill", sequences)).token_ids()
    top: list[float] = []
    for drafts in num_drafts:
        for sequence, text in zip(sequences, texts, strict=True):
            sequence.complete_extend()
            sequence.accept_drafts(len(sequence.draft_ids))
            end = sequence.cached_len + 1
            sequence.token_ids[:] = text[:end]
            # The last sequence has none.
            sequence.draft_ids = text[end : end + drafts] if sequence is not sequences[-1] else ()
            sequence.extend(1 + len(sequence.draft_ids))
        found = engine.forward(Batch("decode", sequences)).logprobs()
        assert len(found) == sum(1 + len(s.draft_ids) for s in sequences)
        top += [p.logprob for p in found[:-1] if p is not None]
    assert not engine.pool.memory[10 * len(sequences) :].any()
    return top


@pytest.mark.parametrize("backend", ["flashinfer", "triton", LATENTS])
@pytest.mark.parametrize("num_drafts", [[1, 1, 1], [2, 7, 4], [7, 7]], ids=str)
def test_graphs_match_single_launches(
    model_dir: Path, latent_model_dir: Path, backend: str, num_drafts: list[int]
) -> None:
    model_dir = latent_model_dir if backend == LATENTS else model_dir
    with_graphs = build(model_dir, backend=backend)
    without = build(model_dir, backend=backend, graphs=0)
    assert with_graphs._draft_graphs is not None and without._draft_graphs is None
    found, expected = (torch.tensor(logprobs_of(engine, num_drafts)) for engine in (with_graphs, without))
    assert_close(found, expected)


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "reference", LATENTS])
def test_rows_behind_drafts_are_those_of_single_steps(model_dir: Path, latent_model_dir: Path, backend: str) -> None:
    engine = build(latent_model_dir if backend == LATENTS else model_dir, backend=backend)
    one_by_one = torch.tensor(logprobs_of(engine, [0] * 8)).view(8, -1)
    at_once = torch.tensor(logprobs_of(engine, [7])).view(-1, 8).T
    # Of 48 rows and of 6, which are rounded by other kernels.
    assert_close(at_once, one_by_one, mean=0.04)


class Outputs:
    def __init__(self, engine: Engine, speculation: str, samplings: Sequence[SamplingParams]) -> None:
        rng = random.Random(1)
        self.token_ids: dict[str, list[int]] = {f"r{number}": [] for number in range(len(samplings))}
        self.logprobs: dict[str, list[TokenLogprobs]] = {name: [] for name in self.token_ids}
        self.prompts = {name: rng.choices(range(3, VOCAB_SIZE), k=10 + 7 * i) for i, name in enumerate(self.token_ids)}
        self._num_ended = 0
        worker = LocalWorker(engine, PrefillConfig(), DecodeConfig(16, speculation=speculation), self._take)
        for name, sampling in zip(self.token_ids, samplings, strict=True):
            worker.submit(name, self.prompts[name], sampling)
        worker.run_until(lambda: self._num_ended == len(samplings), TIMEOUT_S)
        assert worker.scheduler.check_integrity() == ""
        stats = worker.scheduler.stats()
        self.num_accepted = sum(drafted.num_accepted for drafted in stats.drafted)
        self.num_drafted = sum(drafted.num_tokens for drafted in stats.drafted)

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, FirstToken):
            self.token_ids[message.request_id].append(message.token_id)
        elif isinstance(message, Tokens):
            for event in message.events:
                output = self.token_ids[event.request_id]
                output += event.token_ids[len(output) - event.index :]
        elif isinstance(message, Finished):
            self._num_ended += 1


def drafts_from(outputs: Outputs, num_right: int) -> Callable[[Sequence[int], int], Sequence[int]]:
    """Returns a script: the first drafts are right, and the next one is wrong."""

    def script(token_ids: Sequence[int], most: int) -> Sequence[int]:
        for name, prompt in outputs.prompts.items():
            if list(token_ids[: len(prompt)]) == prompt:
                rest = outputs.token_ids[name][len(token_ids) - len(prompt) :]
                drafts = rest[: min(most, num_right)]
                return [*drafts, *[(id_ + 1) % VOCAB_SIZE for id_ in rest[len(drafts) : most][:1]]]
        return ()

    return script


@pytest.mark.parametrize("num_right", [0, 1, 3, 7])
def test_tokens_are_those_without_speculation(model_dir: Path, num_right: int) -> None:
    """In float32, where rounding is too small to change a token."""
    engine = build(model_dir, dtype="float32")
    plain = Outputs(engine, NO_SPECULATION, SAMPLINGS)
    with scripted(drafts_from(plain, num_right), MAX_DRAFTS) as source:
        drafted = Outputs(engine, source, SAMPLINGS)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_drafted > 100 or num_right == 7
    assert (drafted.num_accepted > 100) == (num_right > 0)


def test_greedy_tokens_with_graphs_are_those_without_speculation(model_dir: Path) -> None:
    """In bfloat16 a token may change where two are equally likely. The outputs before are equal."""
    engine = build(model_dir)
    plain = Outputs(engine, NO_SPECULATION, [SamplingParams(40)] * 6)
    with scripted(drafts_from(plain, 3), MAX_DRAFTS) as source:
        drafted = Outputs(engine, source, [SamplingParams(40)] * 6)
    num_equal = sum(
        next((i for i, (a, b) in enumerate(zip(output, plain.token_ids[name], strict=False)) if a != b), len(output))
        for name, output in drafted.token_ids.items()
    )
    assert num_equal >= 120 and drafted.num_accepted > 50


@pytest.mark.parametrize("num_right", [0, 2, 7])
def test_tokens_over_latents_are_those_without_speculation(latent_model_dir: Path, num_right: int) -> None:
    engine = build(latent_model_dir)
    assert engine._draft_graphs is not None
    plain = Outputs(engine, NO_SPECULATION, [SamplingParams(40)] * 6)
    with scripted(drafts_from(plain, num_right), MAX_DRAFTS) as source:
        drafted = Outputs(engine, source, [SamplingParams(40)] * 6)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_drafted > 100 or num_right == 7
    assert (drafted.num_accepted > 100) == (num_right > 0)
