"""Forward passes in graphs write the drafter's pages as single launches do."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tandem.engine.attention.base import GraphedHeadAttention
from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.backend import PageStates
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.draft_models.graphed_backend import GraphableDraftedBackend
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import DecodeGraphs
from tandem.engine.kvcache.pool import PoolRegion
from tandem.engine.mixed_graphs import MixedGraphs, MixedSizes
from tandem.engine.prefill_graphs import PrefillGraphs
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import save_tiny_model
from tests.fakes.graphs import FixedSizes, replay_in_torch
from tests.fakes.tiny_drafters import save_eagle_head

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE = 40, 4
# Takes the dummy page's place.
DUMMY = NUM_PAGES - 1


@pytest.fixture(params=["eagle", "draft"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    replay_in_torch(monkeypatch)
    path, head = tmp_path / "tiny", tmp_path / "head"
    save_tiny_model(path)
    save_eagle_head(head, path)
    drafter = f"eagle:{head}" if request.param == "eagle" else f"draft:{path}"
    config = EngineConfig(
        str(path), page_size=PAGE_SIZE, num_pages=NUM_PAGES, num_threads=1, mixed_steps=True, drafter=drafter
    )
    engine = build_engine(config, "graphed-drafter", lambda doing: None)
    yield engine
    engine.close()


class _OnePosition(FixedSizes):
    """The drafter's attention is given the target's positions, which the fake compares by identity."""

    def __init__(self, pool: PoolRegion, num_heads: int, positions: dict[tuple[str, int], torch.Tensor]) -> None:
        super().__init__(pool, num_heads)
        self._positions = positions

    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        return self._same("decode", super().for_graphs(batch_sizes, max_pages_per_sequence))

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedHeadAttention]:
        return self._same("prefill", super().for_prefill_graphs(sizes, max_sequences, max_pages_per_sequence))

    def _same(self, mode: str, graphed: dict[int, GraphedHeadAttention]) -> dict[int, GraphedHeadAttention]:
        for size, attention in graphed.items():
            attention.positions = self._positions.setdefault((mode, size), attention.positions)
        return graphed


def graphable(engine: Engine) -> GraphableDraftedBackend:
    layout, model = engine.pool.layout, engine.model
    assert isinstance(layout, DraftedLayout) and isinstance(model, DraftedModel)
    positions: dict[tuple[str, int], torch.Tensor] = {}
    target = _OnePosition(PoolRegion(engine.pool, layout.target, 0), model.config.num_q_heads, positions)
    of_drafter = PoolRegion(engine.pool, layout.drafter, layout.drafter_offset)
    drafter = _OnePosition(of_drafter, model.drafter.num_q_heads, positions)
    states = PageStates(engine.pool, layout) if layout.state_size else None
    return GraphableDraftedBackend(target, drafter, states, DUMMY)


def sequences() -> list[TokenSequence]:
    sampling = SamplingParams(9)
    prompts = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7]
    return [
        TokenSequence([*prompt], len(prompt), range(6 * i, 6 * i + 6), sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]


def run(engine: Engine, *, in_graphs: bool) -> torch.Tensor:
    """Prefills two prompts in chunks, then decodes one beside the other. Returns the pages without the dummy."""
    engine.pool.memory.zero_()
    if in_graphs:
        backend, model = graphable(engine), engine.model
        prefills = PrefillGraphs(model, backend, CPU, (8, 16), 10, lambda doing: None)
        decodes = DecodeGraphs(model, backend, CPU, 4, 10, lambda doing: None)
        mixed = MixedGraphs(model, backend, CPU, MixedSizes.grid((2,), (4, 8)), 10, lambda doing: None)
    long, short = sequences()

    def forward(batch: Batch) -> None:
        if not in_graphs:
            engine.forward(batch).token_ids()
        elif batch.mode == "prefill":
            assert prefills.run(batch) is not None
        else:
            assert (decodes if batch.mode == "decode" else mixed).run(batch, None) is not None
        for s in batch.sequences:
            s.complete_extend()

    long.extend(7)
    forward(Batch.of([], [long]))
    long.extend(4)
    short.extend(2)
    forward(Batch.of([], [long, short]))
    for token_id in (7, 9, 2):
        long.token_ids.append(token_id)
        long.extend(1)
        forward(Batch.of([long], []))
    long.token_ids.append(1)
    long.extend(1)
    short.extend(1)
    forward(Batch.of([long], [short]))
    return engine.pool.memory[:DUMMY].view(torch.float32).clone()


def test_graphs_write_the_same_pages(engine: Engine) -> None:
    expected = run(engine, in_graphs=False)
    torch.testing.assert_close(run(engine, in_graphs=True), expected, atol=1e-5, rtol=1e-5)
    assert expected.count_nonzero() > 0


def test_trial_passes_of_few_layers_have_the_drafter_too(engine: Engine) -> None:
    [sequence, _] = sequences()
    sequence.extend(5)
    assert engine.shallow().forward(Batch.of([], [sequence])).done()
