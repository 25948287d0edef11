"""Steps with drafts as graphs, replayed in plain torch, against steps without graphs."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.engine import draft_graphs, graph_runner
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.draft_costs import DraftCosts
from tandem.engine.draft_graphs import DraftGraphs, draft_graph_sizes
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import DecodeGraphs
from tandem.engine.layers.experts.counts import staged_rows
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.trial_batches import TrialBatches
from tandem.sampling_params import SamplingParams
from tests.fakes.graphs import FixedSizes, replay_in_torch

PROMPT_LENS = (5, 20, 33)
SAMPLING = SamplingParams(9, num_logprobs=2, temperature=0.8, seed=4, repetition_penalty=1.3)


def test_graphs_end_at_the_largest_step() -> None:
    assert draft_graph_sizes(64, 0) == () and draft_graph_sizes(0, 7) == ()
    assert draft_graph_sizes(1, 4) == (2, 4, 6)
    assert draft_graph_sizes(1, 7) == (2, 4, 6, 8) and draft_graph_sizes(500, 7)[-1] == 256


@pytest.mark.parametrize("num_drafts", [(0, 3, 7), (1, 0, 0), (7, 7, 2)])
@pytest.mark.parametrize("sampling", [SamplingParams(9), SAMPLING], ids=("greedy", "sampled"))
def test_graphs_match_single_launches(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, num_drafts: tuple[int, ...], sampling: SamplingParams
) -> None:
    replay_in_torch(monkeypatch)
    built = build_engine(EngineConfig(model_dir, load_format="dummy", num_pages=64), "drafts", list[str]().append)
    attention, device = FixedSizes(built.pool), torch.device("cpu")
    graphs = DraftGraphs(built.model, attention, device, [2, 8, 24], 8, list[str]().append)
    engine = Engine(built.model, built.pool, attention, draft_graphs=graphs)
    sequences = []
    rng = random.Random(0)
    for number, (prompt_len, num) in enumerate(zip(PROMPT_LENS, num_drafts, strict=True)):
        pages = range(8 * number, 8 * number + 8)
        token_ids = rng.choices(range(built.model.config.vocab_size), k=prompt_len + num)
        sequence = TokenSequence(token_ids[:prompt_len], prompt_len, pages, sampling=sampling)
        sequence.extend(prompt_len)
        built.forward(Batch("prefill", [sequence]))
        sequence.device_len = sequence.cached_len = prompt_len - 1
        sequence.draft_ids = token_ids[prompt_len:]
        sequence.extend(1 + num)
        sequences.append(sequence)
    batch = Batch("decode", sequences)
    expected = built.forward(batch).token_ids()
    launched = engine._run_graph(batch, None)
    assert launched is not None and launched.choose().token_ids.tolist() == expected
    # A larger step has no graph.
    assert engine._run_graph(TrialBatches(built.model.config).drafted(25, 4, sampling), None) is None
    built.close()


def test_all_sizes_of_steps_are_timed(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_in_torch(monkeypatch)
    engine = build_engine(EngineConfig(model_dir, load_format="dummy", num_pages=8), "drafts", list[str]().append)
    attention, device = FixedSizes(engine.pool), torch.device("cpu")

    def timed(replay: Callable[[], None]) -> float:
        replay()
        return 1.5

    for graphs in (draft_graphs, graph_runner):
        monkeypatch.setattr(graphs, "shortest_s", timed)
    plain = DecodeGraphs(engine.model, attention, device, 4, 8, list[str]().append)
    drafted = DraftGraphs(engine.model, attention, device, [2, 8], 8, list[str]().append)
    assert plain.times_s((1, 4, 6)) == {1: 1.5, 4: 1.5} and drafted.times_s() == {2: 1.5, 8: 1.5}
    # Rows that do not count would choose no experts.
    rows = staged_rows(8, 8)
    assert drafted._graphs[8].staged.view(torch.int64)[8 : 8 + len(rows)].tolist() == rows.tolist()
    engine.close()


def test_trial_steps_have_the_asked_rows(model_dir: str) -> None:
    from tandem.engine.models.config import ModelConfig

    trials = TrialBatches(ModelConfig.from_dir(Path(model_dir)))
    for num_rows, max_drafts in ((2, 1), (8, 7), (9, 7), (24, 7), (30, 4)):
        batch = trials.drafted(num_rows, max_drafts, SamplingParams(1))
        assert batch.num_tokens == len(batch.logits_rows()) == num_rows
        assert max(len(s.draft_ids) for s in batch.sequences) == max_drafts


def test_drafts_cost_what_the_next_size_takes() -> None:
    costs = DraftCosts({1: 4.0, 8: 4.5}, {2: 4.1, 8: 5.0, 16: 5.5})
    assert list(costs.extras_s(1, 20)) == [
        (1, pytest.approx(0.1)),
        (7, pytest.approx(1.0)),
        (15, pytest.approx(1.5)),
    ]
    assert list(costs.extras_s(1, 3)) == [(1, pytest.approx(0.1)), (3, pytest.approx(1.0))]
    assert list(costs.extras_s(3, 5)) == [(5, pytest.approx(0.5))]
    assert list(costs.extras_s(8, 4)) == [(4, pytest.approx(1.0))]
    assert not list(costs.extras_s(16, 4))
    assert costs.pass_s(1) == 0.0
    costs = DraftCosts({1: 4.0}, {2: 4.1}, {1: 0.5, 4: 0.75})
    assert [costs.pass_s(rows) for rows in (1, 2, 4, 5)] == [0.5, 0.75, 0.75, 0.75]
