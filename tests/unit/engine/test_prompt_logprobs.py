"""Prompt logprobs against transformers, with and without chunks."""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine import prompt_logprobs
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import ALL_LOGPROBS, SamplingParams
from tests.cluster.conftest import VOCAB_SIZE, save_tiny_model

PAGE_SIZE = 16
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Oracle:
    logits: torch.Tensor

    def check(self, parts: list[PackedLogprobs], token_ids: list[int], num_top: int) -> None:
        """Args: parts: all parts of the prompt, in order."""
        expected = torch.log_softmax(self.logits, dim=-1)
        position = 1
        for part in parts:
            assert (part.start, part.num_top) == (position, num_top)
            logprobs, ranks = array("f", part.logprobs), array("I", part.ranks)
            top_ids, top = array("I", part.top_ids), array("f", part.top_logprobs)
            assert len(ranks) == len(logprobs) and len(top_ids) == len(top) == num_top * len(logprobs)
            for i, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
                row, own = expected[position - 1], token_ids[position]
                assert logprob == pytest.approx(float(row[own]), abs=TOLERANCE)
                # Neighbors may be closer than the two computations are.
                assert int((row > row[own] + TOLERANCE).sum()) < rank <= int((row >= row[own] - TOLERANCE).sum())
                values = list(top[i * num_top : (i + 1) * num_top])
                assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=TOLERANCE)
                for token_id, value in zip(top_ids[i * num_top : (i + 1) * num_top], values, strict=True):
                    assert value == pytest.approx(float(row[token_id]), abs=TOLERANCE)
                position += 1
        assert position == len(token_ids)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    engine = build_engine(EngineConfig(str(model_path), num_pages=64, num_threads=1), "scored", lambda doing: None)
    yield engine
    engine.pool.close()


@pytest.fixture(scope="module")
def reference(model_path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


@torch.inference_mode()
def oracle(reference: torch.nn.Module, token_ids: list[int]) -> Oracle:
    return Oracle(reference(torch.tensor([token_ids])).logits[0])


def sequence(token_ids: list[int], num_top: int | None, first_page: int, prompt_len: int = 0) -> TokenSequence:
    pages = list(range(first_page, first_page + -(-len(token_ids) // PAGE_SIZE)))
    sampling = SamplingParams(5, num_prompt_logprobs=num_top)
    return TokenSequence(token_ids, prompt_len or len(token_ids), pages, sampling=sampling)


def forward(engine: Engine, sequences: list[TokenSequence], extend_lens: list[int]) -> list[PackedLogprobs | None]:
    for one, extend_len in zip(sequences, extend_lens, strict=True):
        one.extend(extend_len)
    output = engine.forward(Batch("prefill", sequences))
    for one in sequences:
        one.complete_extend()
    return output.prompt_logprobs()


@pytest.mark.parametrize("chunks", [[100], [1, 99], [33, 33, 34], [99, 1], [16] * 6 + [4]])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_whole_and_in_chunks(engine: Engine, reference: torch.nn.Module, chunks: list[int], num_top: int) -> None:
    token_ids = make_prompt(1, 100)
    one = sequence(token_ids, num_top, 0)
    parts = [forward(engine, [one], [chunk])[0] for chunk in chunks]
    oracle(reference, token_ids).check([part for part in parts if part is not None], token_ids, num_top)
    # The last token's successor is sampled and has no prompt logprob.
    assert [part is None for part in parts] == [False] * (len(chunks) - (chunks[-1] == 1)) + [True] * (chunks[-1] == 1)


def test_batch_with_different_numbers_of_logprobs(
    engine: Engine, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More tokens than rows of logits at a time.
    monkeypatch.setattr(prompt_logprobs, "MAX_SLICE_ROWS", 7)
    rows: list[int] = []
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden, out=None: (rows.append(len(hidden)), logits(hidden))[1])
    prompts = [make_prompt(seed, num_tokens) for seed, num_tokens in ((2, 40), (3, 25), (4, 1), (5, 60))]
    asked = [3, None, 20, 0]
    sequences = [sequence(p, k, 10 * i) for i, (p, k) in enumerate(zip(prompts, asked, strict=True))]
    found = forward(engine, sequences, [len(p) for p in prompts])
    assert max(rows) == 7, "those of a slice, and of the four tokens that are sampled"
    assert found[1] is None and found[2] is None
    for number in (0, 3):
        part, num_top = found[number], asked[number]
        assert part is not None and num_top is not None
        oracle(reference, prompts[number]).check([part], prompts[number], num_top)


def test_the_whole_vocabulary_beside_prompts_that_ask_for_less(
    engine: Engine, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    most_likely = prompt_logprobs.most_likely
    monkeypatch.setattr(prompt_logprobs, "most_likely", lambda x, k: (sizes.append((len(x), k)), most_likely(x, k))[1])
    prompts, asked = [make_prompt(7, 12), make_prompt(8, 30)], [ALL_LOGPROBS, 2]
    sequences = [sequence(p, k, 10 * i) for i, (p, k) in enumerate(zip(prompts, asked, strict=True))]
    whole, few = forward(engine, sequences, [12, 30])
    assert whole is not None and few is not None
    oracle(reference, prompts[0]).check([whole], prompts[0], VOCAB_SIZE)
    oracle(reference, prompts[1]).check([few], prompts[1], 2)
    # Sorting whole rows takes much memory, so few are sorted at a time.
    assert sorted(sizes) == [(3, VOCAB_SIZE), (8, VOCAB_SIZE), (29, 2)]


def test_earlier_output_does_not_count_as_prompt(engine: Engine, reference: torch.nn.Module) -> None:
    token_ids = make_prompt(6, 50)
    (part,) = forward(engine, [sequence(token_ids, 2, 0, prompt_len=30)], [50])
    assert part is not None
    oracle(reference, token_ids[:30]).check([part], token_ids[:30], 2)


def test_nothing_is_computed_without_a_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "_score", None)
    assert forward(engine, [sequence(make_prompt(7, 20), None, 0)], [20]) == [None]
