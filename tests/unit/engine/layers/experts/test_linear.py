"""Memory and names of all experts' projections, and shares of them."""

import pytest
import torch

from tandem.engine.layers.experts.linear import ExpertLinear, ExpertShare
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.models.experts import ExpertsConfig, Routing
from tandem.engine.models.quantization import BLOCK, Quantization

CPU = torch.device("cpu")
NAMES = [(f"{expert}.gate", f"{expert}.up") for expert in range(3)]
EXPERTS = ExpertsConfig(8, 512, Routing("softmax", 2))


def make_linear(quantization: Quantization | None = None) -> ExpertLinear:
    return ExpertLinear(3, [BLOCK, BLOCK], 2 * BLOCK, quantization, torch.bfloat16, CPU)


def test_plain_parameters_are_views_of_one_tensor() -> None:
    linear = make_linear()
    assert linear.weight.shape == (3, 2 * BLOCK, 2 * BLOCK) and linear.scale is linear.inputs is None
    found = dict(linear.named_parameters(NAMES))
    assert list(found) == [f"{name}.weight" for names in NAMES for name in names]
    for index, weight in enumerate(found.values()):
        assert weight.shape == (BLOCK, 2 * BLOCK)
        weight.fill_(index)
    assert linear.weight[:, ::BLOCK, 0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert linear.of_expert(1)[BLOCK - 1 : BLOCK + 1, 0].tolist() == [2, 3]
    assert [name for name, _ in linear.stacked_parameters("x")] == ["x.weight"]
    linear.loaded()
    assert linear.input_scale is None and linear.num_experts == 3


@pytest.mark.parametrize(
    ("quantization", "of_scale"),
    [
        (Quantization("tensor", "token"), (BLOCK, 1)),
        (Quantization("channel", "token"), (BLOCK, 1)),
        (Quantization("block", "group"), (1, 2)),
    ],
)
def test_fp8_parameters(quantization: Quantization, of_scale: tuple[int, int]) -> None:
    linear = make_linear(quantization)
    found = dict(linear.named_parameters(NAMES))
    assert len(found) == 2 * 6
    for expert, names in enumerate(NAMES):
        for part, name in enumerate(names):
            assert found[f"{name}.weight"].dtype is FP8_DTYPE and found[f"{name}.weight_scale"].shape == of_scale
            found[f"{name}.weight"].copy_(torch.ones(BLOCK, 2 * BLOCK).to(FP8_DTYPE))
            found[f"{name}.weight_scale"].fill_(10 * expert + part)
    for expert in range(3):
        matrix = linear.of_expert(expert)
        assert matrix.dtype is torch.float32
        assert (matrix[:BLOCK] == 10 * expert).all() and (matrix[BLOCK:] == 10 * expert + 1).all()
    assert [name for name, _ in linear.stacked_parameters("x")] == ["x.weight", "x.weight_scale"]


def test_the_largest_static_scale_of_all_experts_counts() -> None:
    linear = make_linear(Quantization("tensor", "static"))
    scales = {name: scale for name, scale in linear.named_parameters(NAMES) if name.endswith("input_scale")}
    assert list(scales) == [f"{name}.input_scale" for names in NAMES for name in names]
    for index, scale in enumerate(scales.values()):
        assert scale.shape == ()
        scale.fill_(5 - abs(index - 3))
    linear.loaded()
    assert linear.input_scale is not None and linear.input_scale.tolist() == [5]
    assert dict(linear.stacked_parameters("x"))["x.input_scale"].shape == (3, 2)


@pytest.mark.parametrize("share", [(0, 8, 0, 512), (7, 1, 0, 512), (0, 8, 384, 128), (2, 3, 128, 256)])
@pytest.mark.parametrize("quantization", [None, Quantization("block", "group")])
def test_takes_parts_of_the_experts(share: tuple[int, int, int, int], quantization: Quantization | None) -> None:
    ExpertShare(*share).check(EXPERTS, quantization)


@pytest.mark.parametrize("share", [(0, 9, 0, 512), (8, 1, 0, 512), (-1, 1, 0, 512), (0, 0, 0, 512)])
def test_refuses_other_experts(share: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"^experts -?\d+ to -?\d+ are no part of num_experts 8$"):
        ExpertShare(*share).check(EXPERTS, None)


@pytest.mark.parametrize("share", [(0, 8, 0, 513), (0, 8, 512, 1), (0, 8, -128, 256), (0, 8, 0, 0)])
def test_refuses_other_numbers(share: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"numbers from -?\d+ on are no part of moe_intermediate_size 512$"):
        ExpertShare(*share).check(EXPERTS, None)


def test_shares_begin_between_blocks() -> None:
    share = ExpertShare(0, 8, 64, 128)
    share.check(EXPERTS, None)
    share.check(EXPERTS, Quantization("channel", "token"))
    with pytest.raises(ValueError, match=r"^a share of moe_intermediate_size begins at 64, no multiple of 128$"):
        share.check(EXPERTS, Quantization("block", "group"))


def test_one_share_has_the_shared_expert() -> None:
    shares = [ExpertShare(first, 4, offset, 256) for first in (0, 4) for offset in (0, 256)]
    assert [share.has_shared for share in shares] == [True, False, False, False]
