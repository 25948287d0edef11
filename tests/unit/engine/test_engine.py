"""When a decode step and prompts are one forward."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.prefill_graphs import PrefillGraphs

LARGEST_GRAPH = 512


class Graphs:
    def fit(self, num_tokens: int) -> bool:
        return num_tokens <= LARGEST_GRAPH


@pytest.fixture
def built(model_dir: str) -> Iterator[Engine]:
    config = EngineConfig(model_dir, load_format="dummy", num_pages=1, num_threads=1, mixed_steps=True)
    engine = build_engine(config, "mixes", lambda doing: None)
    yield engine
    engine.pool.close()


@pytest.mark.parametrize("mixed_steps", [True, False])
def test_what_a_prefill_graph_is_done_with_sooner_is_no_mixed_step(built: Engine, mixed_steps: bool) -> None:
    attention, graphs = cast(Any, built)._attention, cast(PrefillGraphs, Graphs())
    without = Engine(built.model, built.pool, attention, mixed_steps=mixed_steps)
    engine = Engine(built.model, built.pool, attention, prefill_graphs=graphs, mixed_steps=mixed_steps)
    assert without.mixes(1, 1) == engine.mixes(1, LARGEST_GRAPH) == mixed_steps
    assert not engine.mixes(1, LARGEST_GRAPH // 2) and not engine.mixes(64, 1)
    assert engine.mixes(1, LARGEST_GRAPH // 2 + 1) == mixed_steps
