"""Sizes of prefill graphs, and the batches that run as graphs of many prompts or tokens."""

import itertools
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from tandem.engine import prefill_graphs
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.prefill_graphs import SIZES, PrefillGraphs, large_graph_sizes
from tandem.engine.ranks.record import NO_GRAPH, GraphSize
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.graphs import FixedSizes, replay_in_torch

MAX_PROMPTS = 3


def test_sizes_are_close() -> None:
    assert list(SIZES) == sorted(set(SIZES)) and SIZES[-1] == 2048
    for smaller, larger in itertools.pairwise(SIZES):
        assert larger - smaller <= max(16, larger / 5)


def test_a_whole_chunk_has_a_graph() -> None:
    assert large_graph_sizes(2048) == (512, 1024, 2048)
    assert large_graph_sizes(8192) == (512, 1024, 2048, 4096, 8192)
    assert large_graph_sizes(10_000) == (512, 1024, 2048, 4096, 8192, 10_000)


@pytest.fixture
def engine(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    replay_in_torch(monkeypatch)
    monkeypatch.setattr(prefill_graphs, "MAX_TOKENS", 16)
    monkeypatch.setattr(prefill_graphs, "MAX_PADDING", 1 / 4)
    config = EngineConfig(model_dir, load_format="dummy", num_pages=40, num_threads=1)
    engine = build_engine(config, "chunks", lambda doing: None)
    yield engine
    engine.pool.close()


def graphs_of(engine: Engine) -> PrefillGraphs:
    backend = FixedSizes(engine.pool, engine.model.config.num_q_heads)
    cpu = torch.device("cpu")
    return PrefillGraphs(engine.model, backend, cpu, (8, 16, 32), 40, lambda doing: None, max_prompts=MAX_PROMPTS)


def batch_of(*chunks: tuple[int, int]) -> Batch:
    """Args: chunks: each prompt's cached and new tokens."""
    rng = random.Random(0)
    sequences = []
    for number, (cached_len, num_tokens) in enumerate(chunks):
        prompt = rng.choices(range(32), k=cached_len + num_tokens)
        pages = [*range(10 * number, 10 * number + 10)]
        sequences.append(TokenSequence(prompt, len(prompt), pages, cached_len=cached_len))
        sequences[-1].extend(num_tokens)
    return Batch("prefill", sequences)


def test_padding_of_large_sizes_is_bounded(engine: Engine) -> None:
    graphs = graphs_of(engine)
    sizes = [graphs.size_of(batch_of((0, num_tokens))) for num_tokens in (1, 8, 9, 16, 17, 23, 24, 32, 33)]
    assert [size.num_prompt_tokens for size in sizes] == [8, 8, 16, 16, 0, 0, 32, 32, 0]
    assert graphs.size_of(batch_of(*[(0, 5)] * 3)) == GraphSize(0, 16)
    assert graphs.size_of(batch_of(*[(0, 4)] * 4)) == NO_GRAPH
    assert graphs.run(batch_of((0, 17))) is None


@pytest.mark.parametrize(
    ("chunks", "key"),
    [
        ([(0, 13)], (16, False)),
        ([(0, 11), (0, 20)], (32, True)),
        ([(0, 14), (8, 18)], (32, False)),
        ([(5, 2), (0, 4), (0, 1)], (8, False)),
    ],
    ids=str,
)
def test_graphs_match_single_launches(engine: Engine, chunks: list[tuple[int, int]], key: tuple[int, bool]) -> None:
    graphs = graphs_of(engine)
    output = graphs.run(batch_of(*chunks))
    assert isinstance(output, GraphOutput) and len(output.logits) == len(chunks)
    assert [k for k, graph in graphs._graphs.items() if cast(Any, graph.attention)._num_tokens] == [key]
    pages = engine.pool.memory.clone()
    engine.pool.memory.zero_()
    assert engine.forward(batch_of(*chunks)).token_ids() == output.most_likely.tolist()
    assert torch.equal(engine.pool.memory, pages)
