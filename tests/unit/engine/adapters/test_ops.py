"""Batches of many adapters against transformers with merged weights."""

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.host import cut_adapter
from tandem.engine.adapters.ops import AdapterOps
from tandem.engine.adapters.peft import read_adapter
from tandem.engine.adapters.products import ReferenceProducts
from tandem.engine.adapters.rows import AdapterRows
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch
from tandem.engine.collectives.base import Collectives
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.ops import TorchOps
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.quantization import Quantization
from tandem.engine.page_layout import page_layout_of
from tandem.engine.ranks.config import SINGLE_RANK
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.adapters import merged, write_adapter
from tests.fakes.random_weights import tiny_model
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

CPU = torch.device("cpu")
VOCAB_SIZE = 250
MAX_RANK = 32
NUM_SLOTS = 9
# Each adapter's rank, targets, and more.
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 8},
    {"rank": 32},
    {"rank": 1, "targets": ("q_proj", "v_proj")},
    {"rank": 16, "settings": {"use_rslora": True}, "size": 0.1},
    {"rank": 4, "targets": ("down_proj",)},
    {"rank": 8, "targets": ("gate_proj", "o_proj"), "ranks": {"o_proj": 24}},
    {"rank": 12, "targets": ("up_proj", "k_proj"), "settings": {"lora_alpha": 5}},
    {"rank": 16},
]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3-moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_names = itertools.count()


class Case:
    """A checkpoint with eight adapters."""

    def __init__(self, root: Path, family: str) -> None:
        self.base = tiny_model(family, VOCAB_SIZE, MODELS[family])
        self.path = root / family
        self.base.save_pretrained(self.path)
        self.config = ModelConfig.from_dir(self.path)
        self.adapters = []
        for seed, adapter in enumerate(ADAPTERS):
            wanted = dict(adapter)
            if self.config.experts is not None:
                wanted["targets"] = [t for t in wanted.get("targets", ATTENTION) if t in ATTENTION] or ["k_proj"]
            self.adapters.append(write_adapter(root / f"{family}-{seed}", self.config, seed=seed, **wanted))


@functools.cache
def case_of(root: Path, family: str) -> Case:
    return Case(root, family)


class Runner:
    def __init__(self, case: Case, collectives: Collectives | None = None, *, has_slots: bool = True) -> None:
        config = case.config
        self.model = build_model(config, torch.float32, CPU, collectives)
        self.model.load_weights(load_file(case.path / "model.safetensors").items())
        ranks = SINGLE_RANK if collectives is None else collectives.ranks
        layout = page_layout_of(config, 4, "float32", "auto").shard(ranks.rank, ranks.degree)
        self.pool = CpuKvPool(layout, 512, f"adapters-{next(_names)}")
        self.attention = ReferenceAttention(self.pool, config.num_q_heads // ranks.degree)
        self._pages = iter(range(512))
        self.slots: AdapterSlots | None = None
        if not has_slots:
            return
        self.slots = AdapterSlots(self.model, NUM_SLOTS, MAX_RANK, CPU)
        # Nothing of an earlier adapter may show.
        for held in self.slots.held:
            assert held.linear.adapters is not None
            held.linear.adapters.a.fill_(float("nan"))
            held.linear.adapters.b.fill_(float("nan"))
        for slot, path in enumerate(case.adapters, 1):
            adapter = read_adapter(path, config, MAX_RANK)
            self.slots.write(slot, cut_adapter(adapter, self.slots.held, torch.float32))

    def sequence(self, num_tokens: int, slot: int, seed: int) -> TokenSequence:
        ids = random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)
        pages = [next(self._pages) for _ in range(10)]
        return TokenSequence(ids, num_tokens, pages, adapter_slot=slot)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the logits of sequences that reach their end."""
        self.attention.plan(batch)
        rows = batch.logits_rows()
        adapters = None
        if batch.has_adapters:
            assert self.slots is not None
            adapters = self.slots.batch(batch.adapter_slots(), rows)
        logits = self.model.forward(
            batch.input_ids(CPU), batch.positions(CPU), self.attention, torch.tensor(rows), adapters=adapters
        )
        for sequence in batch.sequences:
            sequence.complete_extend()
        return logits

    def greedy(self, sequences: list[TokenSequence], num_steps: int) -> list[torch.Tensor]:
        """Computes half of the prompts in chunks beside others' decode steps. Returns each step's logits."""
        first, second = sequences[::2], sequences[1::2]
        steps = [self._step([], [(s, s.remaining_len) for s in first])]
        steps.append(self._step(first, [(s, 3) for s in second]))
        steps.append(self._step(first, [(s, s.remaining_len) for s in second]))
        for _ in range(num_steps):
            steps.append(self._step([*first, *second], []))
        return steps

    def _step(self, decoded: list[TokenSequence], prompts: list[tuple[TokenSequence, int]]) -> torch.Tensor:
        for sequence in decoded:
            sequence.extend(1)
        for sequence, num_tokens in prompts:
            sequence.extend(num_tokens)
        batch = Batch.of(decoded, [sequence for sequence, _ in prompts])
        sampled = [s for s in batch.sequences if s.needs_logits]
        logits = self.forward(batch)
        for sequence, token_id in zip(sampled, logits.argmax(-1).tolist(), strict=True):
            sequence.token_ids.append(token_id)
        return logits


def greedy_ids(model: Any, sequence: TokenSequence) -> list[int]:
    """Returns the sequence with the model's choice in place of each of its output tokens."""
    with torch.inference_mode():
        chosen = model(torch.tensor([sequence.token_ids])).logits[0].argmax(-1).tolist()
    return [*sequence.token_ids[: sequence.prompt_len], *chosen[sequence.prompt_len - 1 : -1]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_equal_those_of_merged_weights(root: Path, family: str) -> None:
    case = case_of(root, family)
    runner = Runner(case)
    # Slot 0 is empty: two sequences have no adapter, and two share one.
    wanted = [NO_ADAPTER, *range(1, 9), NO_ADAPTER, 4]
    sequences = [runner.sequence(7 + i, slot, seed=i) for i, slot in enumerate(wanted)]
    runner.greedy(sequences, num_steps=8)
    for sequence in sequences:
        slot = sequence.adapter_slot
        model = case.base if slot == NO_ADAPTER else merged(case.base, case.adapters[slot - 1])
        assert sequence.token_ids == greedy_ids(model, sequence)
        assert (sequence.token_ids == greedy_ids(case.base, sequence)) == (slot == NO_ADAPTER)


def test_rows_without_an_adapter_are_those_of_the_base(root: Path) -> None:
    case = case_of(root, "llama")
    steps = []
    for adapted in (True, False):
        runner = Runner(case, has_slots=adapted)
        slots = [NO_ADAPTER, 2, NO_ADAPTER, NO_ADAPTER]
        sequences = [runner.sequence(9, slot if adapted else NO_ADAPTER, seed=i) for i, slot in enumerate(slots)]
        first = [s.extend(9) for s in sequences] and runner.forward(Batch.of([], sequences))
        for sequence in sequences:
            sequence.token_ids.append(5)
            sequence.extend(1)
        steps.append((first, runner.forward(Batch.of(sequences, []))))
    for with_adapters, without in zip(*steps, strict=True):
        assert torch.equal(with_adapters[[0, 2, 3]], without[[0, 2, 3]])
        assert not torch.equal(with_adapters[1], without[1])


def test_adapters_change_fp8_projections_in_their_own_precision() -> None:
    torch.manual_seed(0)
    linear = Fp8Linear(("q", "k"), [32, 16], 64, False, Quantization("channel", "token"), torch.bfloat16, CPU)
    linear.weight.copy_(torch.randn(48, 64))
    linear.scale.fill_(0.1)
    weights = linear.adapters = AdapterWeights([32, 16], 64, 2, 8, torch.bfloat16, CPU)
    weights.a.normal_()
    weights.b.normal_()
    weights.ranks[1] = torch.tensor([8, 3])
    x = torch.randn(3, 64).bfloat16()
    rows = AdapterRows.of(np.array([NO_ADAPTER, 1, 0], np.int32), CPU)
    found = AdapterOps(TorchOps(), ReferenceProducts(), rows).linear(x, linear).float()
    base = linear(x).float()
    assert torch.equal(found[[0, 2]], base[[0, 2]])
    of_parts = [x[1].float() @ weights.a[1, part, :rank].float().t() for part, rank in ((0, 8), (1, 3))]
    added = [ranks @ weights.b_of(1, part)[: len(ranks)].float() for part, ranks in enumerate(of_parts)]
    torch.testing.assert_close(found[1] - base[1], torch.cat(added), rtol=0.02, atol=1.0)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_ranks_compute_what_one_computes(root: Path, family: str, degree: int) -> None:
    case = case_of(root, family)

    def logits(collectives: Collectives | None) -> list[torch.Tensor]:
        runner = Runner(case, collectives)
        sequences = [runner.sequence(7 + i, slot, seed=i) for i, slot in enumerate([*range(1, 9), NO_ADAPTER])]
        for sequence in sequences:
            sequence.extend(sequence.remaining_len)
        steps = [runner.forward(Batch.of([], sequences))]
        for token_id, sequence in enumerate(sequences):
            sequence.token_ids.append(token_id)
            sequence.extend(1)
        return [*steps, runner.forward(Batch.of(sequences, []))]

    def on_rank(group: ThreadGroup, collectives: ThreadCollectives) -> list[torch.Tensor]:
        return logits(collectives)

    leader = run_ranks(degree, on_rank)[0]
    torch.testing.assert_close(leader, logits(None), atol=2e-4, rtol=1e-4)
