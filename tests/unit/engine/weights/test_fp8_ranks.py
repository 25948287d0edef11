"""FP8 weights and their scales in the parts of ranks, with quantized inputs in plain torch."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.layers.ops import TorchOps
from tandem.engine.layers.ranked_ops import RankedOps
from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.page_layout import page_layout_of
from tandem.engine.ranks.checks import check_degree
from tandem.engine.ranks.config import SINGLE_RANK
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.fingerprint import model_fingerprint
from tandem.engine.weights.loader import load_weights
from tests.fakes.fp8_checkpoints import make_model, save_fp8
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

CPU = torch.device("cpu")
# Of one token, so that none reads another's.
NUM_SEQUENCES = 24
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "experts": ("qwen2_moe", {}),
    "sliced": ("mixtral", {"num_local_experts": 3}),
}
_names = itertools.count()


def _model(config: ModelConfig, path: Path, collectives: ThreadCollectives | None) -> Model:
    ops = TorchOps() if collectives is None else RankedOps(TorchOps(), collectives)
    model = DecoderModel(config, torch.float32, CPU, ops, collectives)
    load_weights(model, path, "auto", config.quantization, CPU, lambda doing: None)
    return model


def _logits(model: Model) -> torch.Tensor:
    """Returns (NUM_SEQUENCES, vocab_size)."""
    config, ranks = model.config, SINGLE_RANK if model.collectives is None else model.collectives.ranks
    layout = page_layout_of(config, 16, "float32", "auto").shard(ranks.rank, ranks.degree)
    pool = CpuKvPool(layout, NUM_SEQUENCES, f"fp8-ranks-{next(_names)}")
    attention = ReferenceAttention(pool, config.num_q_heads // ranks.degree)
    sequences = [TokenSequence([number], 1, [number]) for number in range(NUM_SEQUENCES)]
    for sequence in sequences:
        sequence.extend(1)
    batch = Batch("prefill", sequences)
    attention.plan(batch)
    return model.forward(batch.input_ids(CPU), batch.positions(CPU), attention, None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["at_load", "tensors_static", "channels_dynamic", "fp8_static", "blocks"])
def test_ranks_have_the_whole_models_weights_and_scales(family: str, kind: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    model = make_model(name, num_key_value_heads=4, intermediate_size=512, **settings)
    if kind == "at_load":
        model.save_pretrained(tmp_path)
    else:
        save_fp8(model, tmp_path, kind)
    config = ModelConfig.from_dir(tmp_path).quantized("fp8" if kind == "at_load" else "auto")
    check_degree(config, 2)
    whole = _model(config, tmp_path, None)
    expected, fingerprint, tensors = _logits(whole), model_fingerprint(whole), dict(whole.stacked_parameters())

    def run(group: ThreadGroup, collectives: ThreadCollectives) -> torch.Tensor:
        held_model = _model(config, tmp_path, collectives)
        parts, names = held_model.parts(), set()
        for tensor_name, held in held_model.stacked_parameters():
            part = parts.get(tensor_name)
            of_whole = tensors[tensor_name] if part is None else part.of(tensors[tensor_name])
            assert torch.equal(of_whole.float(), held.float()), tensor_name
            names.update({tensor_name.rpartition(".")[2]} if part is not None else ())
        assert names >= {"weight", "weight_scale"}
        assert model_fingerprint(held_model, group=group) == fingerprint
        return _logits(held_model)

    logits, _ = run_ranks(2, run)
    # A token's inputs have a scale on each rank, if it is dynamic, and so have whole experts: these round otherwise.
    rounds_otherwise = kind in ("at_load", "channels_dynamic") or (family == "experts" and kind.endswith("static"))
    # A number between two FP8 numbers may be rounded to either, because sums have another order: not in most sequences.
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < (0.15 if rounds_otherwise else 1e-5)
