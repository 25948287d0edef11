"""Embeddings against transformers: whole, in chunks, after a cached prefix, beside other work of the same pass."""

import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.embedding import EmbeddingParams
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE, save_tiny_model

PAGE_SIZE = 16


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def reference(model_path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["auto", "fp8_e4m3"])
def engine(model_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = EngineConfig(str(model_path), num_pages=64, num_threads=1, kv_cache_dtype=request.param)
    engine = build_engine(config, f"embedding-{request.param}", lambda doing: None)
    yield engine
    engine.pool.close()


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


@torch.inference_mode()
def oracle(reference: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """Returns the last hidden state of the last token: (hidden_size,)."""
    model: Any = reference.model
    state: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0, -1]
    return state


def to_embed(token_ids: list[int], first_page: int, params: EmbeddingParams | None = None) -> TokenSequence:
    pages = list(range(first_page, first_page + -(-len(token_ids) // PAGE_SIZE)))
    return TokenSequence(token_ids, len(token_ids), pages, embedding=params or EmbeddingParams())


def vector(values: bytes | None) -> torch.Tensor:
    assert values is not None
    return torch.tensor(array("f", values))


def forward(engine: Engine, sequences: list[TokenSequence], extend_lens: list[int]) -> list[bytes | None]:
    for one, extend_len in zip(sequences, extend_lens, strict=True):
        one.extend(extend_len)
    output = engine.forward(Batch("prefill", sequences))
    for one in sequences:
        one.complete_extend()
    return output.embeddings()


def least_cosine(engine: Engine) -> float:
    # Keys and values of 8 bits cost a model this small some exactness.
    return 0.98 if "float8" in engine.pool.layout.tag else 0.999


def check(engine: Engine, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.cosine_similarity(found, expected, dim=0) > least_cosine(engine)
    if least_cosine(engine) == 0.999:
        assert torch.allclose(found, expected / expected.norm(), atol=2e-5)
    assert found.norm() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("chunks", [[100], [1, 99], [33, 33, 34], [99, 1], [16] * 6 + [4]])
def test_whole_and_in_chunks(engine: Engine, reference: torch.nn.Module, chunks: list[int]) -> None:
    token_ids = make_prompt(1, 100)
    one = to_embed(token_ids, 0)
    *early, last = [forward(engine, [one], [chunk])[0] for chunk in chunks]
    assert early == [None] * len(early), "only the last token's state counts"
    check(engine, vector(last), oracle(reference, token_ids))


def test_after_a_cached_prefix(engine: Engine, reference: torch.nn.Module) -> None:
    prefix = make_prompt(2, 48)
    forward(engine, [to_embed(prefix, 0)], [48])
    token_ids = [*prefix, *make_prompt(3, 5)]
    again = TokenSequence(token_ids, 53, [0, 1, 2, 3], cached_len=48, embedding=EmbeddingParams())
    check(engine, vector(forward(engine, [again], [5])[0]), oracle(reference, token_ids))


def test_beside_prompts_that_sample_and_that_are_scored(engine: Engine, reference: torch.nn.Module) -> None:
    prompts = [make_prompt(seed, num_tokens) for seed, num_tokens in ((4, 40), (5, 25), (6, 1), (7, 60))]
    for num_prompt_logprobs in (None, 3):
        sampling = SamplingParams(5, num_prompt_logprobs=num_prompt_logprobs)
        sequences = [
            to_embed(prompts[0], 0),
            TokenSequence(prompts[1], 25, [10, 11], sampling=sampling),
            to_embed(prompts[2], 20),
            to_embed(prompts[3], 30),
        ]
        for one, num_tokens in zip(sequences, (40, 25, 1, 30), strict=True):
            one.extend(num_tokens)
        batch = Batch("prefill", sequences)
        output = engine.forward(batch)
        found = output.embeddings()
        assert [values is None for values in found] == [False, True, False, True]
        assert len(output.token_ids()) == 1, "an embedded prompt has no next token"
        for number in (0, 2):
            check(engine, vector(found[number]), oracle(reference, prompts[number]))
        scored = output.prompt_logprobs()
        assert [part is None for part in scored] == [True, num_prompt_logprobs is None, True, True]


def test_beside_a_decode_step(engine: Engine, reference: torch.nn.Module) -> None:
    prompt, decoded_ids = make_prompt(8, 20), make_prompt(9, 17)
    decoded = TokenSequence(decoded_ids, 16, [40, 41], sampling=SamplingParams(5))
    decoded.extend(16)
    engine.forward(Batch("prefill", [decoded]))
    decoded.complete_extend()
    decoded.extend(1)
    one = to_embed(prompt, 0)
    one.extend(20)
    output = engine.forward(Batch.of([decoded], [one]))
    found, token_ids = output.embeddings(), output.token_ids()
    assert found[0] is None and len(token_ids) == 1
    check(engine, vector(found[1]), oracle(reference, prompt))


def test_dimensions_and_length(engine: Engine, reference: torch.nn.Module) -> None:
    token_ids = make_prompt(10, 30)
    params = [EmbeddingParams(8), EmbeddingParams(8, is_normalized=False), EmbeddingParams(is_normalized=False)]
    sequences = [to_embed(token_ids, 10 * number, one) for number, one in enumerate(params)]
    cut, raw, whole = [vector(values) for values in forward(engine, sequences, [30] * 3)]
    expected = oracle(reference, token_ids)
    assert torch.cosine_similarity(whole, expected, dim=0) > least_cosine(engine)
    assert torch.equal(raw, whole[:8])
    assert torch.allclose(cut, raw / raw.norm(), atol=1e-6)
    assert whole.norm() != pytest.approx(1.0, abs=1e-2), "not normalized"


def test_states_of_an_unfinished_prompt_are_not_asked_for() -> None:
    one = to_embed(make_prompt(11, 30), 0)
    one.extend(10)
    batch = Batch("prefill", [one])
    assert (batch.pooled_rows(), batch.logits_rows(), batch.needs_hidden_states) == ([], [], False)
    one.complete_extend()
    one.extend(20)
    assert (batch.pooled_rows(), batch.logits_rows(), batch.needs_hidden_states) == ([19], [], True)
