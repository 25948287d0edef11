"""Choice and weights of experts, against transformers' routers and by hand."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tandem.engine.layers.experts.routing import choose_experts, router_logits
from tandem.engine.models.experts import Routing

HIDDEN_SIZE = 64
NUM_TOKENS = 500
SIGMOID: dict[str, Any] = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
ROUTERS: dict[str, tuple[Any, str, dict[str, Any], Routing]] = {
    "mixtral": (
        MixtralTopKRouter,
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        Routing("softmax", 2, normalize=True),
    ),
    "olmoe": (OlmoeTopKRouter, "olmoe", {"num_experts": 64, "num_experts_per_tok": 8}, Routing("softmax", 8)),
    "qwen2_moe": (
        Qwen2MoeTopKRouter,
        "qwen2_moe",
        {"num_experts": 60, "num_experts_per_tok": 4},
        Routing("softmax", 4),
    ),
    "qwen3_moe": (
        Qwen3MoeTopKRouter,
        "qwen3_moe",
        {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        Routing("softmax", 8, normalize=True),
    ),
    "all of few": (
        Qwen3MoeTopKRouter,
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 3},
        Routing("softmax", 3),
    ),
    "dots1": (
        Dots1TopkRouter,
        "dots1",
        SIGMOID | {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
        Routing("sigmoid", 6, normalize=True, scaling=2.5, has_bias=True),
    ),
    "dots1 as it is": (
        Dots1TopkRouter,
        "dots1",
        SIGMOID | {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
        Routing("sigmoid", 6, has_bias=True),
    ),
    "dots1 in groups": (
        Dots1TopkRouter,
        "dots1",
        SIGMOID | {"n_group": 8, "topk_group": 3, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
        Routing("sigmoid", 6, True, 1.5, has_bias=True, num_groups=8, num_groups_used=3),
    ),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        {"n_routed_experts": 64, "num_experts_per_tok": 6},
        Routing("softmax", 6, num_ranked=1, float32_logits=True),
    ),
    "deepseek_v2 in groups": (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        {
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
        },
        Routing("softmax", 6, scaling=16.0, num_groups=8, num_groups_used=3, num_ranked=1, float32_logits=True),
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
        Routing("sigmoid", 8, True, 2.5, has_bias=True, num_groups=8, num_groups_used=4),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("router", "family", "settings", "routing"), ROUTERS.values(), ids=ROUTERS)
def test_equals_transformers(
    router: Any, family: str, settings: dict[str, Any], routing: Routing, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    theirs = router(AutoConfig.for_model(family, hidden_size=HIDDEN_SIZE, **settings))
    bias: torch.Tensor | None = None
    with torch.no_grad():
        theirs.weight.normal_(0.0, 0.3, generator=generator)
        theirs.weight.data = theirs.weight.to(dtype)
        if routing.has_bias:
            bias = theirs.e_score_correction_bias
            # As large as differences of scores: it changes choices.
            assert bias is not None
            bias.normal_(0.0, 0.2, generator=generator)
    x = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).to(dtype)
    with torch.inference_mode():
        logits, expected_weights, expected = theirs(x)
        ours = router_logits(x, theirs.weight, routing)
        assert torch.equal(ours, logits.float()) and ours.dtype is torch.float32
        weights, experts = choose_experts(ours, bias, routing)
    assert weights.shape == experts.shape == (NUM_TOKENS, routing.num_chosen) and weights.dtype is torch.float32
    # Sorted, because transformers does not order the choice by sigmoids. In bfloat16 some logits tie.
    order, expected_order = experts.argsort(), expected.argsort()
    chosen, expected = experts.gather(1, order), expected.gather(1, expected_order)
    same = (chosen == expected).all(1)
    assert same.all() if dtype is torch.float32 else same.float().mean() > 0.7
    weights, expected_weights = weights.gather(1, order)[same], expected_weights.gather(1, expected_order)[same]
    # Some of transformers' routers round to the model's dtype.
    tolerance = 1e-6 if expected_weights.dtype is torch.float32 else 2**-8
    torch.testing.assert_close(weights, expected_weights.float(), atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 2, 300])
@pytest.mark.parametrize("num_experts", [4, 8, 60, 128, 512])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_lowest_of_equal_experts_are_chosen(scoring: Any, num_experts: int, num_tokens: int) -> None:
    routing = Routing(scoring, 4)
    _, experts = choose_experts(torch.full((num_tokens, num_experts), 0.25), None, routing)
    assert experts.tolist() == [[0, 1, 2, 3]] * num_tokens
    # The best first, then equal ones from the lowest on.
    logits = torch.zeros(num_tokens, num_experts)
    logits[:, -1] = 1.0
    _, experts = choose_experts(logits, None, routing)
    assert experts.tolist() == [[num_experts - 1, 0, 1, 2]] * num_tokens
    logits[:, 0] = -1.0
    _, experts = choose_experts(logits, None, routing)
    assert experts.tolist() == [by_score(logits[0])[:4]] * num_tokens


def by_score(scores: torch.Tensor) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: (-float(scores[expert]), expert))


def test_few_distinct_scores_are_ranked_by_score_and_index() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 3, (200, 32), generator=generator).float()
    bias = torch.randint(0, 2, (32,), generator=generator) / 8
    _, experts = choose_experts(logits, bias, Routing("sigmoid", 6, has_bias=True))
    for scores, chosen in zip((logits.sigmoid() + bias), experts.tolist(), strict=True):
        assert chosen == by_score(scores)[:6]


def test_the_lowest_of_equal_groups_are_candidates() -> None:
    routing = Routing("sigmoid", 3, has_bias=True, num_groups=4, num_groups_used=2)
    _, experts = choose_experts(torch.zeros(5, 16), torch.zeros(16), routing)
    assert experts.tolist() == [[0, 1, 2]] * 5
    # Group 2 has the best pair; of the others, which are equal, group 0 is taken.
    bias = torch.zeros(16)
    bias[9] = bias[10] = 0.1
    _, experts = choose_experts(torch.zeros(5, 16), bias, routing)
    assert experts.tolist() == [[9, 10, 0]] * 5
    # The best expert alone does not make its group a candidate.
    bias = torch.tensor([[0.5, 0.0, 0.0, 0.0], [0.3, 0.3, 0.0, 0.0], [0.3, 0.3, 0.0, 0.0], [0.0] * 4]).flatten()
    _, experts = choose_experts(torch.zeros(1, 16), bias, routing)
    assert experts.tolist() == [[4, 5, 8]]


def test_experts_of_negative_scores_are_chosen_before_those_of_other_groups() -> None:
    routing = Routing("sigmoid", 4, has_bias=True, num_groups=2, num_groups_used=1)
    # Sums of scores and bias are below 0 in both groups, and lower in the second.
    _, experts = choose_experts(torch.zeros(1, 8), torch.tensor([-1.0] * 4 + [-2.0] * 4), routing)
    assert experts.tolist() == [[0, 1, 2, 3]]


def test_weights_of_the_lowest_scores_are_finite() -> None:
    for routing in (Routing("sigmoid", 2, normalize=True), Routing("softmax", 2, normalize=True)):
        weights, _ = choose_experts(torch.full((3, 8), -1e4), None, routing)
        assert weights.isfinite().all()
