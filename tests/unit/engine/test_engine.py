"""Conditions for a mixed step."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.mixed_graphs import MixedGraphs, MixedSizes
from tandem.engine.prefill_graphs import MAX_PROMPTS, PrefillGraphs

LARGEST_PREFILL_GRAPH = 512
MIXED_SIZES = MixedSizes.grid((16, 32), (128, 256))


class Graphs:
    def fit(self, num_tokens: int) -> bool:
        return num_tokens <= LARGEST_PREFILL_GRAPH


@pytest.fixture
def built(model_dir: str) -> Iterator[Engine]:
    config = EngineConfig(model_dir, load_format="dummy", num_pages=1, num_threads=1, mixed_steps=True)
    engine = build_engine(config, "mixes", lambda doing: None)
    yield engine
    engine.pool.close()


@pytest.mark.parametrize("mixed_steps", [True, False])
def test_step_faster_as_two_graphs_is_not_mixed(built: Engine, mixed_steps: bool) -> None:
    attention, graphs = cast(Any, built)._attention, cast(PrefillGraphs, Graphs())
    without = Engine(built.model, built.pool, attention, mixed_steps=mixed_steps)
    engine = Engine(built.model, built.pool, attention, prefill_graphs=graphs, mixed_steps=mixed_steps)
    assert without.mixes(1, 1) == mixed_steps
    assert not engine.mixes(1, LARGEST_PREFILL_GRAPH) and not engine.mixes(64, 1)
    # Such a prompt is launched kernel by kernel in any case.
    assert engine.mixes(1, LARGEST_PREFILL_GRAPH + 1) == mixed_steps
    assert engine.num_unpadded(1, 300) == engine.num_padded(1, 300) == 300


@pytest.mark.parametrize("mixed_steps", [True, False])
def test_step_with_a_mixed_graph_is_mixed(built: Engine, mixed_steps: bool) -> None:
    engine = Engine(
        built.model,
        built.pool,
        cast(Any, built)._attention,
        prefill_graphs=cast(PrefillGraphs, Graphs()),
        mixed_steps=mixed_steps,
        mixed_graphs=cast(MixedGraphs, SimpleNamespace(sizes=MIXED_SIZES)),
    )
    assert engine.mixes(1, 1) == engine.mixes(32, 256) == mixed_steps
    assert not engine.mixes(33, 1) and not engine.mixes(1, 257)
    assert engine.mixes(32, 200, MAX_PROMPTS) == mixed_steps and not engine.mixes(32, 200, MAX_PROMPTS + 1)
    assert engine.num_unpadded(32, 255) == (128 if mixed_steps else 255)
    assert engine.num_padded(32, 255) == (256 if mixed_steps else 255)
