"""Engines with slots: graphs, whose replay is the captured function, and an engine as a worker builds it."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.host import cut_adapter
from tandem.engine.adapters.modules import slot_numbers
from tandem.engine.adapters.peft import read_adapter, read_info
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.draft_graphs import DraftGraphs
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import DecodeGraphs
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.mixed_graphs import MixedGraphs, MixedSizes
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.prefill_graphs import PrefillGraphs
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.loader import load_weights
from tests.fakes.adapters import write_adapter
from tests.fakes.graphs import FixedSizes, replay_in_torch

CPU = torch.device("cpu")
NUM_SLOTS = 3
MAX_RANK = 4
_names = itertools.count()


class Case:
    def __init__(self, model_dir: str, root: Path) -> None:
        config = ModelConfig.from_dir(Path(model_dir))
        self.model = build_model(config, torch.float32, CPU)
        self.slots = AdapterSlots(self.model, NUM_SLOTS, MAX_RANK, CPU)
        load_weights(self.model, Path(), "dummy", None, CPU, lambda doing: None)
        for slot in range(NUM_SLOTS):
            path = write_adapter(root / f"adapter-{slot}", config, slot + 1, seed=slot, size=1.0)
            adapter = read_adapter(path, config, MAX_RANK)
            self.slots.write(slot, cut_adapter(adapter, self.slots.held, torch.float32))
        layout = page_layout_of(config, 4, "float32", "auto")
        self.pool = CpuKvPool(layout, 512, f"slots-{next(_names)}")
        self.attention = FixedSizes(self.pool)
        self.engine = Engine(self.model, self.pool, self.attention, mixed_steps=True, slots=self.slots)
        self._pages = iter(range(512))

    def sequences(self, slots: list[int], num_cached: int) -> list[TokenSequence]:
        """Returns sequences of which all tokens but one, or but some, are computed."""
        made = []
        for number, slot in enumerate(slots):
            length = 6 + number % 3
            ids = random.Random(number).choices(range(32), k=length)
            sequence = TokenSequence(ids, length, [next(self._pages) for _ in range(4)], adapter_slot=slot)
            if num_cached:
                sequence.extend(num_cached)
                self.engine.forward(Batch("prefill", [sequence]))
                sequence.complete_extend()
            made.append(sequence)
        return made

    def eager(self, batch: Batch) -> list[int]:
        return self.engine.forward(batch).token_ids()


@pytest.fixture
def case(model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    replay_in_torch(monkeypatch)
    return Case(model_dir, tmp_path)


@pytest.mark.parametrize("slots", [[0, 1, 2, NO_ADAPTER, 0], [NO_ADAPTER] * 3, [2]])
def test_one_graph_computes_every_mix(case: Case, slots: list[int]) -> None:
    graphs = DecodeGraphs(case.model, case.attention, CPU, 8, 6, lambda doing: None, case.slots)
    # An earlier step with other adapters leaves nothing behind.
    other = case.sequences([1, 1, 1, 1, 1, 1], 5)
    for sequence in other:
        sequence.extend(1)
    graphs.run(Batch("decode", other), None)
    decoded = case.sequences(slots, 5)
    for sequence in decoded:
        sequence.token_ids[6:] = []
        sequence.extend(1)
    batch = Batch("decode", decoded)
    output = graphs.run(batch, None)
    assert output is not None and output.most_likely.tolist() == case.eager(batch)


def test_draft_graph_gives_each_row_its_adapter(case: Case) -> None:
    graphs = DraftGraphs(case.model, case.attention, CPU, [8], 6, lambda doing: None, case.slots)
    for slots in ([1, NO_ADAPTER], [NO_ADAPTER, NO_ADAPTER], [2, 0]):
        decoded = case.sequences(slots, 5)
        for sequence, draft_ids in zip(decoded, ([3, 4, 5], [6]), strict=True):
            sequence.token_ids[6:] = []
            sequence.draft_ids = draft_ids
            sequence.extend(1 + len(draft_ids))
        batch = Batch("decode", decoded)
        output = graphs.run(batch)
        assert output is not None and output.most_likely.tolist() == case.eager(batch)


def test_prefill_graph_selects_the_rows_of_the_last_layer(case: Case) -> None:
    graphs = PrefillGraphs(case.model, case.attention, CPU, [32], 6, lambda doing: None, case.slots)
    prompts = case.sequences([0, 2, NO_ADAPTER, 1], 0)
    for number, sequence in enumerate(prompts):
        # The first two chunks end before their prompts.
        sequence.extend(sequence.remaining_len - (number < 2))
    batch = Batch("prefill", prompts)
    output = graphs.run(batch)
    assert output is not None and output.most_likely.tolist() == case.eager(batch)


def test_mixed_graph_pads_between_both_kinds(case: Case) -> None:
    sizes = MixedSizes.grid((4,), (16,))
    graphs = MixedGraphs(case.model, case.attention, CPU, sizes, 6, lambda doing: None, case.slots)
    decoded, prompts = case.sequences([1, NO_ADAPTER], 5), case.sequences([2, 0], 0)
    for sequence in decoded:
        sequence.token_ids[6:] = []
        sequence.num_pending = 0
        sequence.extend(1)
    for sequence in prompts:
        sequence.extend(sequence.remaining_len)
    batch = Batch.of(decoded, prompts)
    output = graphs.run(batch, None)
    assert output is not None and output.most_likely.tolist() == case.eager(batch)


@pytest.fixture
def engine(model_dir: str) -> Iterator[Engine]:
    options = {"max_loras": NUM_SLOTS, "max_lora_rank": MAX_RANK}
    config = EngineConfig(model_dir, load_format="dummy", num_pages=8, num_threads=1, **options)  # type: ignore[arg-type]
    built = build_engine(config, f"slots-{next(_names)}", lambda doing: None)
    yield built
    built.close()


def test_built_engine_lends_its_adapters(engine: Engine, model_dir: str, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(Path(model_dir))
    info = read_info(write_adapter(tmp_path / "one", config, 3), config, MAX_RANK)
    assert engine.adapters is not None and engine.adapters.limits.max_loras == NUM_SLOTS
    engine.adapters.add(info)
    while engine.adapters.acquire(info.content_hash) is None:
        pass
    assert engine.slots is not None
    numbers = slot_numbers(config, MAX_RANK)
    assert 4 * NUM_SLOTS * numbers <= engine.slots.num_bytes <= 4 * NUM_SLOTS * (numbers + 100)


def test_engine_without_slots_is_as_before(model_dir: str) -> None:
    config = EngineConfig(model_dir, load_format="dummy", num_pages=8, num_threads=1)
    engine = build_engine(config, f"slots-{next(_names)}", lambda doing: None)
    assert engine.adapters is None and engine.slots is None
    assert all(held.linear.adapters is None for held in engine.model.adaptable())
    engine.close()
