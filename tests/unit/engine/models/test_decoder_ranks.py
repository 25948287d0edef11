"""Models in parts, on ranks as threads over gloo, against the whole model."""

import functools
import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine.attention.latent_reference import LatentReferenceAttention
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch
from tandem.engine.collectives.base import Collectives
from tandem.engine.collectives.gloo import GlooCollectives
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.ranks.checks import check_degree, cuts_by_expert
from tandem.engine.ranks.config import SINGLE_RANK
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import load_weights
from tests.fakes.random_weights import tiny_model
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

CPU = torch.device("cpu")
VOCAB_SIZE = 250
NUM_STEPS = 6
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    **_MOE,
}
MODELS: dict[str, dict[str, Any]] = {
    **{f"llama_{heads}": {"num_key_value_heads": heads} for heads in (1, 2, 4)},
    "llama_biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral_sliced": {"num_local_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 1},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    "olmoe_replicated": {"num_experts": 8, "num_experts_per_tok": 3},
    "qwen2-moe": {"num_experts": 8, "shared_expert_intermediate_size": 80, **_MOE},
    "qwen2-moe_sliced": {"num_experts": 6, "shared_expert_intermediate_size": 80, **_MOE},
    "deepseek-v2": {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1, **_LATENT},
    "deepseek-v3": {
        "q_lora_rank": 40,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "n_group": 4,
        "topk_group": 2,
        **_LATENT,
    },
}
_names = itertools.count()


class Run(NamedTuple):
    """Attributes: logits: of each step, (num_sequences, vocab_size)."""

    logits: list[torch.Tensor]
    ids: list[list[int]]


@functools.cache
def _directory(variant: str, root: Path) -> Path:
    model = tiny_model(variant.partition("_")[0], VOCAB_SIZE, {"pad_token_id": None, **MODELS[variant]})
    model.save_pretrained(root / variant)
    return root / variant


def _generate(directory: Path, page_size: int, collectives: Collectives | None) -> Run:
    """Computes a prompt in two chunks, beside another one, then greedy steps."""
    config = ModelConfig.from_dir(directory)
    model = build_model(config, torch.float32, CPU, collectives)
    model.load_weights(load_file(directory / "model.safetensors").items())
    ranks = SINGLE_RANK if collectives is None else collectives.ranks
    layout = page_layout_of(config, page_size, "float32", "auto").shard(ranks.rank, ranks.degree)
    pool = CpuKvPool(layout, 128 // page_size, f"sharded-{next(_names)}")
    backend = ReferenceAttention if config.latent is None else LatentReferenceAttention
    attention = backend(pool, config.num_q_heads // ranks.degree)
    draw = random.Random(1)
    num_pages = layout.num_pages_for(60)
    sequences = [
        TokenSequence(draw.choices(range(VOCAB_SIZE), k=size), size, list(range(i * num_pages, (i + 1) * num_pages)))
        for i, size in enumerate((40, 9))
    ]

    def forward(lens: list[int]) -> torch.Tensor:
        for sequence, extend_len in zip(sequences, lens, strict=True):
            sequence.extend(extend_len)
        batch = Batch("decode" if lens == [1, 1] else "prefill", sequences)
        attention.plan(batch)
        rows = torch.tensor(batch.logits_rows(), dtype=torch.int64)
        logits = model.forward(batch.input_ids(CPU), batch.positions(CPU), attention, rows)
        for sequence in sequences:
            sequence.complete_extend()
        return logits

    first, second = sequences
    sequences = [first]
    assert not len(forward([23]))
    sequences = [first, second]
    lens, steps = [17, 9], []
    for _ in range(NUM_STEPS):
        logits = forward(lens)
        steps.append(logits)
        ids = logits.argmax(-1) if ranks.is_leader else torch.zeros(2, dtype=torch.int64)
        if collectives is not None:
            collectives.broadcast(ids)
        for sequence, token_id in zip(sequences, ids.tolist(), strict=True):
            sequence.token_ids.append(token_id)
        lens = [1, 1]
    return Run(steps, [sequence.token_ids for sequence in sequences])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("variant", MODELS)
def test_ranks_generate_what_the_whole_model_generates(variant: str, degree: int, root: Path, tmp_path: Path) -> None:
    directory = _directory(variant, root)
    config = ModelConfig.from_dir(directory)
    check_degree(config, degree)
    assert config.experts is None or cuts_by_expert(config, degree) == ("sliced" not in variant or degree == 2)
    for page_size in (1, 16) if variant.startswith("llama") else (16,):
        expected = _generate(directory, page_size, None)

        def run(group: ThreadGroup, _: ThreadCollectives, page_size: int = page_size) -> Run:
            gloo = GlooCollectives(group.ranks, tmp_path / f"store-{page_size}", 20.0)
            return _generate(directory, page_size, gloo)

        leader, *followers = run_ranks(degree, run)
        assert leader.ids == expected.ids
        torch.testing.assert_close(leader.logits, expected.logits, atol=2e-4, rtol=1e-4)
        assert all(follower.ids == leader.ids for follower in followers)


@pytest.mark.parametrize("variant", MODELS)
def test_dummies_are_parts_of_the_whole_models_and_fingerprints_are_equal(variant: str, root: Path) -> None:
    config = ModelConfig.from_dir(_directory(variant, root))

    def filled(collectives: Collectives | None) -> Model:
        model = build_model(config, torch.float32, CPU, collectives)
        load_weights(model, Path(), "dummy", None, CPU, lambda doing: None)
        return model

    whole = filled(None)
    tensors = dict(whole.stacked_parameters())

    def run(group: ThreadGroup, collectives: ThreadCollectives) -> str:
        model = filled(collectives)
        parts = model.parts()
        num_cut = 0
        for name, held in model.stacked_parameters():
            if name in parts:
                assert torch.equal(parts[name].of(tensors[name]), held), name
                num_cut += 1
            elif not name.endswith("bias"):
                assert torch.equal(tensors[name], held), name
        assert num_cut > 5
        return model_fingerprint(model, group=group)

    for degree in (2, 4):
        assert run_ranks(degree, run) == [model_fingerprint(whole)] * degree


def test_a_rank_refuses_a_checkpoint_of_another_shape(root: Path) -> None:
    directory = _directory("llama_2", root)
    weights = load_file(directory / "model.safetensors")
    # The shape of the rank's part.
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(56, 64)

    def load(group: ThreadGroup, collectives: ThreadCollectives) -> None:
        model = build_model(ModelConfig.from_dir(directory), torch.float32, CPU, collectives)
        with pytest.raises(ValueError, match=r"up_proj.weight has shape \(56, 64\), not \(112, 64\)$"):
            model.load_weights(weights.items())

    run_ranks(2, load)
