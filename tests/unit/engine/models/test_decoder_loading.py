"""Accepted and rejected tensors of a checkpoint."""

from typing import Any

import pytest
import torch

from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.ops import TorchOps
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.experts import ExpertsConfig, Routing


def make_model(architecture: str = "LlamaForCausalLM", **changes: Any) -> Model:
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **changes,
    }
    return build_model(ModelConfig(architecture, **settings), torch.bfloat16, torch.device("cpu"))


def make_weights(model: Model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in model.named_parameters()}


class CapturedOps(TorchOps):
    def captures(self, experts: Experts) -> bool:
        return True


def test_graphs_capture_mixtures_only_if_the_operations_never_wait() -> None:
    experts = ExpertsConfig(4, 32, Routing("softmax", 2), dense_layers=(1,))
    assert make_model().is_capturable
    model = make_model("Qwen3MoeForCausalLM", experts=experts)
    assert not model.is_capturable
    assert DecoderModel(model.config, torch.bfloat16, torch.device("cpu"), CapturedOps()).is_capturable


def check_refused(
    model: Model, weights: dict[str, torch.Tensor], name: str, tensor: torch.Tensor | None, message: str
) -> None:
    """Replace one tensor, or remove it if `tensor` is None, and load the weights."""
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    with pytest.raises(ValueError, match=message):
        model.load_weights(weights.items())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "model.layers.1.mlp.up_proj.weight is missing$"),
        ("lm_head.weight", None, "lm_head.weight is missing"),
        ("model.layers.2.mlp.up_proj.weight", torch.zeros(1), "model.layers.2.mlp.up_proj.weight is unexpected"),
        ("model.norm.weight", torch.zeros(65), r"model.norm.weight has shape \(65,\), not \(64,\)"),
        ("model.layers.0.self_attn.k_proj.weight", torch.zeros(64, 64), r"k_proj.weight has shape \(64, 64\)"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int8), "model.norm.weight has dtype torch.int8"),
        # Ignoring these would change logits.
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), "q_proj.bias is unexpected"),
        ("model.layers.0.self_attn.q_norm.weight", torch.zeros(16), "q_norm.weight is unexpected"),
    ],
)
def test_refuses_other_tensors(name: str, tensor: torch.Tensor | None, message: str) -> None:
    model = make_model()
    check_refused(model, make_weights(model), name, tensor, message)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architecture": "Qwen2ForCausalLM", "qkv_bias": True}, "model.layers.1.self_attn.v_proj.bias"),
        ({"architecture": "Qwen3ForCausalLM", "qk_norm": True}, "model.layers.0.self_attn.k_norm.weight"),
        ({"o_bias": True}, "model.layers.0.self_attn.o_proj.bias"),
        ({"mlp_bias": True}, "model.layers.0.mlp.down_proj.bias"),
    ],
)
def test_refuses_checkpoints_without_required_tensors(changes: dict[str, Any], name: str) -> None:
    model = make_model(**changes)
    weights = make_weights(model)
    model.load_weights(weights.items())
    del weights[name]
    with pytest.raises(ValueError, match=f"{name} is missing$"):
        model.load_weights(weights.items())


def test_says_how_many_are_missing() -> None:
    model = make_model(num_layers=1)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is missing and 11 more$"):
        model.load_weights([])


def test_refuses_a_tensor_twice_and_ignores_rotary_buffers() -> None:
    model = make_model()
    weights = list(make_weights(model).items())
    model.load_weights([("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8)), *weights])
    with pytest.raises(ValueError, match="is duplicated"):
        model.load_weights([*weights, weights[0]])


def test_tied_checkpoint_may_carry_the_head() -> None:
    model = make_model(tie_word_embeddings=True)
    weights = make_weights(model)
    assert "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight"].clone()
    model.load_weights([("lm_head.weight", head), *weights.items()])
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        model.load_weights([("lm_head.weight", head + 1), *weights.items()])
    with pytest.raises(ValueError, match=r"lm_head.weight has shape"):
        model.load_weights([("lm_head.weight", head[1:]), *weights.items()])


EXPERTS = ExpertsConfig(4, 16, Routing("softmax", 2), shared_intermediate_size=16, shared_gate=True)
OF_EXPERT = "model.layers.1.mlp.experts.3"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{OF_EXPERT}.down_proj.weight", None, f"^tensor {OF_EXPERT}.down_proj.weight is missing$"),
        ("model.layers.0.mlp.gate.weight", None, "^tensor model.layers.0.mlp.gate.weight is missing$"),
        ("model.layers.0.mlp.shared_expert_gate.weight", None, "mlp.shared_expert_gate.weight is missing$"),
        (f"{OF_EXPERT}.up_proj.weight", torch.zeros(17, 64), rf"{OF_EXPERT}.up_proj.weight has shape \(17, 64\), not"),
        (f"{OF_EXPERT}.up_proj.weight", torch.zeros(16), rf"{OF_EXPERT}.up_proj.weight has shape \(16,\), not"),
        ("model.layers.0.mlp.experts.4.up_proj.weight", torch.zeros(16, 64), "experts.4.up_proj.weight is unexpected$"),
        ("model.layers.0.mlp.gate.weight", torch.zeros(5, 64), r"gate.weight has shape \(5, 64\), not \(4, 64\)$"),
        ("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(4, 32, 64), "experts.gate_up_proj is unexpected$"),
        ("model.layers.0.mlp.gate.e_score_correction_bias", torch.zeros(4), "e_score_correction_bias is unexpected$"),
        # A dense layer's.
        ("model.layers.1.mlp.up_proj.weight", torch.zeros(48, 64), "layers.1.mlp.up_proj.weight is unexpected$"),
    ],
)
def test_refuses_other_experts(name: str, tensor: torch.Tensor | None, message: str) -> None:
    model = make_model("Qwen2MoeForCausalLM", experts=EXPERTS)
    weights = make_weights(model)
    model.load_weights(weights.items())
    check_refused(model, weights, name, tensor, message)


def test_projections_are_all_matrices_of_layers() -> None:
    for model in (make_model(), make_model("Qwen2MoeForCausalLM", experts=EXPERTS)):
        matrices = {
            name.removesuffix(".weight")
            for name, tensor in model.named_parameters()
            if ".layers." in name and tensor.dim() == 2 and "gate.weight" not in name
        }
        projections = list(model.projections())
        assert set(projections) == matrices and len(projections) == len(matrices)
