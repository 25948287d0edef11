"""A layer's whole mixture of experts by kernels, against plain torch, and independent of other rows."""

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.experts.counts import ExpertCounts, LayerCounts
from tandem.engine.layers.experts.reference import mixture_of, shared_output
from tandem.engine.layers.experts.routing import choose_experts
from tandem.engine.layers.norm import Norm, rms_norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.experts import ExpertsConfig, Routing
from tandem.engine.models.linears import Linears
from tandem.engine.models.mlp.sparse import SparseMlp
from tandem.engine.models.quantization import Quantization

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
HIDDEN, EXPERT, NUM_EXPERTS, CHOSEN = 512, 256, 32, 4
# Each kernel has at least two: few rows, grouped, many rows.
NUM_ROWS = (1, 3, 8, 9, 64, 130, 700, 1025, 4099)
KINDS = {
    "plain": None,
    "channel": Quantization(),
    "block": Quantization("block", "group"),
    "static": Quantization("tensor", "static"),
}
FAMILIES = {
    "softmax": ExpertsConfig(NUM_EXPERTS, EXPERT, Routing("softmax", CHOSEN, normalize=True)),
    "sigmoid": ExpertsConfig(
        NUM_EXPERTS, EXPERT, Routing("sigmoid", CHOSEN, True, 2.5, has_bias=True, num_groups=8, num_groups_used=4)
    ),
    "shared": ExpertsConfig(NUM_EXPERTS, EXPERT, Routing("softmax", CHOSEN), 384, shared_gate=True),
}


# Kernels do not multiply the first, choose in the second, or do either in the third.
WITHOUT_KERNELS = {
    "odd size": ExpertsConfig(NUM_EXPERTS, 40, Routing("softmax", CHOSEN)),
    "many chosen": ExpertsConfig(64, EXPERT, Routing("softmax", 33, normalize=True)),
    "many experts": ExpertsConfig(520, 16, Routing("sigmoid", CHOSEN, True, has_bias=True)),
}


def make_mlp(family: str, kind: str, counts: LayerCounts | None = None) -> SparseMlp:
    experts = (FAMILIES | WITHOUT_KERNELS)[family]
    config = ModelConfig(
        "Qwen3MoeForCausalLM",
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=EXPERT,
        num_layers=1,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        experts=experts,
        quantization=KINDS[kind],
    )
    mlp = SparseMlp(Linears(config, 0, torch.bfloat16, DEVICE), counts=counts)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for name, parameter in mlp.stacked_parameters():
        if name.endswith("_scale"):
            parameter.fill_(0.2 if name.endswith("input_scale") else 0.001)
            continue
        largest = 200.0 if parameter.dtype is torch.float8_e4m3fn else 0.2
        numbers = torch.empty(parameter.shape, device=DEVICE).uniform_(-largest, largest, generator=generator)
        parameter.copy_(numbers.to(parameter.dtype))
    mlp.loaded()
    return mlp


def rows(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).bfloat16()


def expected_output(experts: Experts, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the mixture in plain torch, with the router's logits in float32, as kernels have them."""
    normed, router = rms_norm(x, *norm), experts.router
    logits = F.linear(normed.float(), router.weight.float())
    output = mixture_of(normed, *choose_experts(logits, router.bias, router.routing), experts)
    return output if experts.shared is None else output + shared_output(normed, experts.shared)


@pytest.fixture(scope="module")
def ops() -> LayerOps:
    from tandem.engine.layers.cuda_ops import CudaOps

    return CudaOps(DEVICE)


@pytest.fixture(scope="module")
def norm() -> Norm:
    return Norm(torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE), 1e-6)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_torch(family: str, kind: str, num_rows: int, norm: Norm, ops: LayerOps) -> None:
    mlp, x = make_mlp(family, kind), rows(num_rows)
    expected = expected_output(mlp._experts, x, norm).float()
    actual = (mlp.forward(x.clone(), norm, ops) - x).float()
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    # FP8 inputs of few rows are not quantized.
    assert error.max() < (0.02 if kind == "plain" else 0.09)


@pytest.mark.parametrize("num_rows", [8, 9, 130])
@pytest.mark.parametrize("family", WITHOUT_KERNELS)
def test_plain_torch_computes_what_kernels_cannot(family: str, num_rows: int, norm: Norm, ops: LayerOps) -> None:
    config = WITHOUT_KERNELS[family]
    counts = ExpertCounts([0], config.num_experts, 1, DEVICE)
    mlp, x = make_mlp(family, "plain", counts.of_layer(0)), rows(num_rows)
    assert not mlp.is_capturable(ops) and make_mlp("softmax", "plain").is_capturable(ops)
    expected = expected_output(mlp._experts, x, norm).float()
    actual = (mlp.forward(x.clone(), norm, ops) - x).float()
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    # The logits of plain torch are bfloat16, so another of two nearly equal experts may be chosen.
    assert error.median() < 0.02
    assert int(counts.counts.sum()) == num_rows * config.routing.num_chosen


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_runs_give_the_same_bits(kind: str, num_rows: int, norm: Norm, ops: LayerOps) -> None:
    mlp, x = make_mlp("shared", kind), rows(num_rows)
    first = mlp.forward(x.clone(), norm, ops)
    for _ in range(100):
        assert torch.equal(mlp.forward(x.clone(), norm, ops), first)


@pytest.mark.parametrize("num_rows", NUM_ROWS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_change_no_bit(kind: str, num_rows: int, norm: Norm, ops: LayerOps) -> None:
    mlp, x = make_mlp("softmax", kind), rows(num_rows)
    expected = mlp.forward(x.clone(), norm, ops)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    permuted = mlp.forward(x[order].contiguous(), norm, ops)
    assert torch.equal(permuted, expected[order])
    kept = num_rows // 2
    for others in (rows(num_rows, seed=2), x[kept].expand(num_rows, HIDDEN).clone(), torch.zeros_like(x)):
        others[kept] = x[kept]
        assert torch.equal(mlp.forward(others, norm, ops)[kept], expected[kept])
