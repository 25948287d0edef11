"""Drafts made in graphs, replayed in plain torch, against those of single launches."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tandem.engine.attention.drafted_layout import DraftedLayout
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models import pass_graphs
from tandem.engine.draft_models.backend import DraftedBackend
from tandem.engine.draft_models.draft_maker import DraftMaker
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.draft_models.pass_graphs import SIZES, PassGraphs, pass_graph_sizes
from tandem.engine.engine import Engine
from tandem.engine.kvcache.pool import PoolRegion
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import save_tiny_model
from tests.fakes.graphs import FixedSizes, replay_in_torch
from tests.fakes.tiny_drafters import save_eagle_head

CPU = torch.device("cpu")
PROMPTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [2, 7, 1, 8, 2, 8]
SAMPLED = SamplingParams(9, temperature=0.9, seed=3)
FILTERED = replace(SAMPLED, temperature=1.5, top_k=40, top_p=0.9, min_p=0.01)
PENALIZED = replace(SAMPLED, repetition_penalty=1.5, frequency_penalty=2.0)


@pytest.fixture(scope="module", params=["eagle", "draft"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "tiny"
    head = path.with_name("head")
    save_tiny_model(path)
    save_eagle_head(head, path)
    drafter = f"eagle:{head}" if request.param == "eagle" else f"draft:{path}"
    config = EngineConfig(str(path), page_size=4, num_pages=40, num_threads=1, drafter=drafter)
    engine = build_engine(config, "pass-graphs", lambda doing: None)
    yield engine
    engine.close()


def graphs_of(engine: Engine) -> PassGraphs:
    layout, model = engine.pool.layout, engine.model
    assert isinstance(layout, DraftedLayout) and isinstance(model, DraftedModel)
    attention = FixedSizes(PoolRegion(engine.pool, layout.drafter, layout.drafter_offset), model.drafter.num_q_heads)
    return PassGraphs(model.drafter, attention, CPU, (1, 4), model.dtype, 10, lambda doing: None)


def prefilled(engine: Engine, samplings: list[SamplingParams]) -> list[TokenSequence]:
    sequences = []
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True)):
        sequence = TokenSequence([*prompt], len(prompt), range(6 * number, 6 * number + 6), sampling=sampling)
        sequence.extend(len(prompt) - 1)
        engine.forward(Batch.of([], [sequence])).token_ids()
        sequence.complete_extend()
        sequences.append(sequence)
    return sequences


@pytest.mark.parametrize("num_drafts", [[4, 4, 4], [1, 4, 2], [0, 3, 3]], ids=str)
@pytest.mark.parametrize(
    "samplings",
    [[SamplingParams(9)] * 3, [SAMPLED, FILTERED, SamplingParams(9)], [SamplingParams(9), PENALIZED, SAMPLED]],
    ids=["greedy", "sampled", "penalties"],
)
def test_graphs_make_the_drafts_of_single_launches(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, samplings: list[SamplingParams], num_drafts: list[int]
) -> None:
    replay_in_torch(monkeypatch)
    assert engine.draft_maker is not None
    sequences = prefilled(engine, samplings)
    expected = engine.draft_maker.make(sequences, num_drafts)
    assert [len(drafts) for drafts in expected] == num_drafts
    model, attention = engine.model, engine._attention
    assert isinstance(model, DraftedModel) and isinstance(attention, DraftedBackend)
    graphed = DraftMaker(model, attention, CPU, graphs_of(engine))
    # Not the pages that the first drafts have written.
    sequences = prefilled(engine, samplings)
    run = model.drafter.run
    monkeypatch.setattr(graphed._launched, "run", lambda sequences: pytest.fail("launched"))
    assert graphed.make(sequences, num_drafts) == expected
    # One draft of all but the last, and so on: the drafts of each are those that it has alone.
    alone = [graphed.make([s], [4])[0] for s in sequences]
    assert [drafts[:count] for drafts, count in zip(alone, num_drafts, strict=True)] == expected
    assert model.drafter.run == run


def test_larger_batches_are_launched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_in_torch(monkeypatch)
    graphs = graphs_of(engine)
    assert graphs.fit(4) and not graphs.fit(5)


def test_all_sizes_are_timed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_in_torch(monkeypatch)

    def timed(replay: Callable[[], None]) -> float:
        replay()
        return 1.5

    monkeypatch.setattr(pass_graphs, "shortest_s", timed)
    assert graphs_of(engine).times_s() == {1: 1.5, 4: 1.5}


def test_sizes_end_at_the_largest_step() -> None:
    assert pass_graph_sizes(0) == () and pass_graph_sizes(1) == (1,) and pass_graph_sizes(5) == (1, 2, 4, 8)
    assert pass_graph_sizes(500) == SIZES and SIZES[-1] == 128
