"""Prefills of many prompts or tokens as CUDA graphs against single launches."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE, save_tiny_model

CHUNK_SIZE = 4096
PAGE_SIZE = 16
NUM_PAGES = 700
SCORED = SamplingParams(1, num_logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-long"
    save_tiny_model(directory, head_dim=64)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 2 * CHUNK_SIZE}))
    return directory


def build(directory: Path, *, graphs: bool) -> Engine:
    config = EngineConfig(
        str(directory),
        device="cuda",
        dtype="bfloat16",
        num_pages=NUM_PAGES,
        max_chunk_tokens=CHUNK_SIZE,
        cuda_graph_max_bs=0,
        prefill_cuda_graphs=graphs,
    )
    return build_engine(config, "test", lambda doing: None)


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[tuple[Engine, Engine]]:
    """With graphs and without."""
    engines = build(directory, graphs=True), build(directory, graphs=False)
    yield engines
    for engine in engines:
        engine.close()


def compute(engine: Engine, chunks: list[tuple[int, int]]) -> tuple[torch.Tensor, list[float]]:
    """Computes each prompt in two forward passes. Returns the pages and the first tokens' logprobs."""
    rng = random.Random(0)
    engine.pool.memory.zero_()
    sequences: list[TokenSequence] = []
    num_pages = 0
    for lengths in chunks:
        prompt = rng.choices(range(VOCAB_SIZE), k=sum(lengths))
        pages = [*range(num_pages, num_pages + len(prompt) // PAGE_SIZE + 1)]
        num_pages += len(pages)
        sequences.append(TokenSequence(prompt, len(prompt), pages, sampling=SCORED))
    for part in range(2):
        for sequence, lengths in zip(sequences, chunks, strict=True):
            sequence.extend(lengths[part])
        output = engine.forward(Batch("prefill", sequences))
        output.token_ids()
        for sequence in sequences:
            sequence.complete_extend()
    assert not engine.pool.memory[num_pages:].any()
    return engine.pool.memory[:num_pages].view(torch.bfloat16).float(), [p.logprob for p in output.logprobs() if p]


@pytest.mark.parametrize(
    "chunks",
    [[(4096, 4000)], [(500, 490)] * 8, [(32, 31)] * 128, [(3000, 50), (1000, 3900), (7, 1)], [(3, 14)] * 100],
    ids=("whole", "several", "many", "uneven", "short"),
)
def test_large_graphs_match_single_launches(
    engines: tuple[Engine, Engine], chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_graphs, without = engines
    assert with_graphs._large_graphs is not None and without._large_graphs is None
    found: list[bool] = []
    run = with_graphs._large_graphs.run

    def counted(batch: Batch) -> GraphOutput | None:
        output = run(batch)
        found.append(output is not None)
        return output

    monkeypatch.setattr(with_graphs._large_graphs, "run", counted)
    pages, logprobs = compute(with_graphs, chunks)
    assert found == [True, True]
    expected_pages, expected_logprobs = compute(without, chunks)
    assert torch.allclose(pages, expected_pages, atol=0.05, rtol=0.05)
    assert logprobs == pytest.approx(expected_logprobs, abs=0.05)
