"""Sizes of prefill graphs, and the batches that run as graphs of full chunks."""

import itertools
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.prefill_graphs import SIZES, GraphLimits, PrefillGraphs, chunk_graph_sizes
from tandem.engine.ranks.record import NO_GRAPH, GraphSize
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.graphs import FixedSizes, replay_in_torch

LIMITS = GraphLimits(max_prompts=3, max_padding=1 / 4, has_new=True)


def test_sizes_are_close() -> None:
    assert list(SIZES) == sorted(set(SIZES)) and SIZES[-1] == 2048
    for smaller, larger in itertools.pairwise(SIZES):
        assert larger - smaller <= max(16, larger / 5)


def test_a_whole_chunk_has_a_graph() -> None:
    assert chunk_graph_sizes(2048) == ()
    assert chunk_graph_sizes(8192) == (4096, 8192)
    assert chunk_graph_sizes(10_000) == (4096, 8192, 10_000)


@pytest.fixture
def engine(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    replay_in_torch(monkeypatch)
    config = EngineConfig(model_dir, load_format="dummy", num_pages=40, num_threads=1)
    engine = build_engine(config, "chunks", lambda doing: None)
    yield engine
    engine.pool.close()


def chunk_graphs(engine: Engine) -> PrefillGraphs:
    backend = FixedSizes(engine.pool, engine.model.config.num_q_heads)
    return PrefillGraphs(engine.model, backend, torch.device("cpu"), (16, 32), 40, lambda doing: None, limits=LIMITS)


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


def test_padding_is_bounded(engine: Engine) -> None:
    graphs = chunk_graphs(engine)
    sizes = {num_tokens: graphs.size_of(batch_of((0, num_tokens))) for num_tokens in (11, 12, 16, 17, 24, 32, 33)}
    assert [num_tokens for num_tokens, size in sizes.items() if size != NO_GRAPH] == [12, 16, 24, 32]
    assert sizes[24] == GraphSize(0, 32)
    assert graphs.size_of(batch_of(*[(0, 5)] * 3)) == GraphSize(0, 16)
    assert graphs.size_of(batch_of(*[(0, 4)] * 4)) == NO_GRAPH
    assert graphs.run(batch_of((0, 17))) is None


@pytest.mark.parametrize("chunks", [[(0, 16)], [(0, 9), (0, 20)], [(5, 16)], [(0, 14), (8, 18)]], ids=str)
def test_graphs_match_single_launches(engine: Engine, chunks: list[tuple[int, int]]) -> None:
    graphs = chunk_graphs(engine)
    output = graphs.run(batch_of(*chunks))
    assert isinstance(output, GraphOutput) and len(output.logits) == len(chunks)
    pages = engine.pool.memory.clone()
    engine.pool.memory.zero_()
    assert engine.forward(batch_of(*chunks)).token_ids() == output.most_likely.tolist()
    assert torch.equal(engine.pool.memory, pages)
    size = 16 if sum(num_tokens for _, num_tokens in chunks) <= 16 else 32
    is_new = not any(cached_len for cached_len, _ in chunks)
    assert {key for key, graph in graphs._graphs.items() if cast(Any, graph.attention)._num_tokens} == {(size, is_new)}
