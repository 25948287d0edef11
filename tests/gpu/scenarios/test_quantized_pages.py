"""Engines with 8-bit KV pages on a GPU: graphs, chunks and caches keep their results, and little accuracy is lost."""

import logging
import math
import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.dry_run import free_bytes
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE
from tests.gpu.engine.test_engine import generate

PAGE_SIZE = 16
GREEDY = SamplingParams(1)
SCORED = SamplingParams(1, num_prompt_logprobs=0)
# Length and number of the perplexity texts.
TEXT_LEN, NUM_TEXTS = 2000, 12


def config(model_dir: Path, **settings: object) -> EngineConfig:
    plain = EngineConfig(
        str(model_dir),
        device="cuda",
        dtype="bfloat16",
        num_pages=200,
        cuda_graph_max_bs=0,
        prefill_cuda_graphs=False,
        kv_cache_dtype="fp8_e4m3",
    )
    return replace(plain, **settings)  # type: ignore[arg-type]


def build(engine_config: EngineConfig) -> Engine:
    return build_engine(engine_config, "quantized", lambda doing: None)


def score(engine: Engine, prompt: list[int], chunks: list[int]) -> torch.Tensor:
    """Return (len(prompt) - 1,) logprobs."""
    pages = list(range(len(prompt) // PAGE_SIZE + 1))
    sequence = TokenSequence(prompt, len(prompt), pages, sampling=SCORED)
    logprobs = array("f")
    for num_tokens in chunks:
        sequence.extend(num_tokens)
        output = engine.forward(Batch("prefill", [sequence]))
        sequence.complete_extend()
        (part,) = output.prompt_logprobs()
        assert part is not None
        logprobs.frombytes(part.logprobs)
    return torch.tensor(list(logprobs))


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("num_sequences", [1, 3, 9])
def test_graphs_match_single_launches(model_dir: Path, num_sequences: int, backend: str) -> None:
    prompt_lens = [5, 33, 16, 90, 1, 48, 64, 17, 31][:num_sequences]
    with_graphs = build(config(model_dir, attention_backend=backend, cuda_graph_max_bs=16))
    without = build(config(model_dir, attention_backend=backend))
    assert generate(with_graphs, prompt_lens, 24, GREEDY) == generate(without, prompt_lens, 24, GREEDY)


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "reference"])
def test_prompt_scores_match_float32_whole_and_in_chunks(model_dir: Path, backend: str) -> None:
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=400)
    expected = score(build(config(model_dir, dtype="float32")), prompt, [400])
    engine = build(config(model_dir, attention_backend=backend))
    whole, chunked = score(engine, prompt, [400]), score(engine, prompt, [100, 1, 200, 99])
    # Logits are large: plain torch in bfloat16 is off by 0.28 on average, because bfloat16 errors flip FP8 roundings.
    # bfloat16 alone accounts for 0.08.
    for found in (whole, chunked):
        assert (found - expected).abs().mean() < 0.4
    assert (whole - chunked).abs().mean() < 0.4


def test_float32_matches_the_reference_whole_and_in_chunks(model_dir: Path) -> None:
    prompt = random.Random(2).choices(range(VOCAB_SIZE), k=300)
    engine = build(config(model_dir, dtype="float32"))
    whole, chunked = score(engine, prompt, [300]), score(engine, prompt, [100, 1, 150, 49])
    assert (whole - chunked).abs().mean() < 0.02


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_pool_of_the_same_share_holds_twice_the_pages(
    model_dir: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Large pages: the tiny model's pool would have millions of small ones.
    shared = {"page_size": 1024, "num_pages": 0, "mem_fraction_static": 0.5, "attention_backend": backend}
    num_pages = {}
    for kv_cache_dtype in ("auto", "fp8_e4m3"):
        with caplog.at_level(logging.INFO, "tandem.engine.loaded_model"):
            engine = build(config(model_dir, kv_cache_dtype=kv_cache_dtype, cuda_graph_max_bs=16, **shared))
        num_pages[kv_cache_dtype] = engine.pool.num_pages
        del engine
        free_bytes()
    assert num_pages["fp8_e4m3"] == pytest.approx(2 * num_pages["auto"], rel=0.02)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_perplexity_of_a_real_model_is_within_half_a_percent(request: pytest.FixtureRequest) -> None:
    try:
        smollm2_dir = request.getfixturevalue("smollm2_dir")
    except Exception as error:
        pytest.skip(f"the demo model is not here: {error}")
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    # Python's own documentation: prose on every machine.
    prose = "\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(prose).ids[: TEXT_LEN * NUM_TEXTS]
    texts = [ids[start : start + TEXT_LEN] for start in range(0, TEXT_LEN * NUM_TEXTS, TEXT_LEN)]
    perplexity = {}
    for kv_cache_dtype in ("auto", "fp8_e4m3"):
        engine = build(config(smollm2_dir, kv_cache_dtype=kv_cache_dtype, max_chunk_tokens=1000))
        logprobs = torch.cat([score(engine, text, [1000] * (TEXT_LEN // 1000)) for text in texts])
        perplexity[kv_cache_dtype] = math.exp(-logprobs.mean())
        del engine
        free_bytes()
    assert perplexity["fp8_e4m3"] == pytest.approx(perplexity["auto"], rel=0.005)
