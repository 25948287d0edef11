"""Validation of sizes and routing, and what follows from them."""

from typing import Any

import pytest

from tandem.engine.models.experts import MAX_EXPERTS, ExpertsConfig, Routing


def make_config(num_experts: Any = 8, size: Any = 64, num_chosen: Any = 2, **changes: Any) -> ExpertsConfig:
    groups = {key: changes.pop(key) for key in ("num_groups", "num_groups_used") if key in changes}
    return ExpertsConfig(num_experts, size, Routing("softmax", num_chosen, **groups), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "tanh"}, "^scoring must be softmax or sigmoid, not 'tanh'$"),
        ({"num_chosen": 0}, "^num_experts_per_tok must be a whole number of at least 1, not 0$"),
        ({"num_chosen": True}, "^num_experts_per_tok must be a whole number of at least 1, not True$"),
        ({"num_chosen": 2.0}, "^num_experts_per_tok must be a whole number"),
        ({"num_chosen": MAX_EXPERTS + 1}, "^num_experts_per_tok must be at most 4096, not 4097$"),
        ({"normalize": 1}, "^norm_topk_prob must be true or false, not 1$"),
        ({"scaling": 0.0}, "^routed_scaling_factor must be a number greater than 0, not 0.0$"),
        ({"scaling": float("inf")}, "^routed_scaling_factor must be a number greater than 0, not inf$"),
        ({"num_groups": 0}, "^n_group must be a whole number of at least 1, not 0$"),
        ({"num_groups_used": None}, "^topk_group must be a whole number of at least 1, not None$"),
        ({"num_groups": 2, "num_groups_used": 3}, "^topk_group 3 is more than n_group 2$"),
    ],
)
def test_refuses_routing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(**{"scoring": "softmax", "num_chosen": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "^num_experts must be a whole number of at least 1, not 0$"),
        ({"num_experts": "8"}, "^num_experts must be a whole number of at least 1, not '8'$"),
        ({"num_experts": MAX_EXPERTS + 1}, "^num_experts must be at most 4096, not 4097$"),
        ({"num_experts": None, "count_key": "n_routed_experts"}, "^n_routed_experts must be a whole number"),
        ({"size": 0}, "^moe_intermediate_size must be a whole number of at least 1, not 0$"),
        ({"size": -1, "size_key": "intermediate_size"}, "^intermediate_size must be a whole number"),
        ({"shared_intermediate_size": -1}, "^shared_expert_intermediate_size must be a whole number of at least 0"),
        ({"shared_intermediate_size": False}, "^shared_expert_intermediate_size must be a whole number of at least 0"),
        ({"num_chosen": 9}, "^num_experts_per_tok 9 is more than num_experts 8$"),
        (
            {"num_chosen": 9, "count_key": "num_local_experts"},
            "^num_experts_per_tok 9 is more than num_local_experts 8$",
        ),
        ({"num_groups": 3}, "^num_experts 8 is not a multiple of n_group 3$"),
        ({"num_groups": 8}, "^n_group 8 leaves fewer than 2 of num_experts 8 in a group$"),
        ({"num_groups": 4, "num_chosen": 3}, "^num_experts_per_tok 3 is more than the 2 experts of topk_group 1$"),
    ],
)
def test_refuses_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


def test_takes_the_extremes() -> None:
    make_config(num_experts=1, num_chosen=1)
    make_config(num_experts=MAX_EXPERTS, num_chosen=MAX_EXPERTS)
    make_config(num_groups=4, num_groups_used=1)
    make_config(num_groups=4, num_groups_used=4, num_chosen=8)


def test_layers_without_experts_are_not_counted() -> None:
    assert make_config(dense_layers=(0, 3)).num_sparse_layers(5) == 3


def test_expected_number_of_touched_experts() -> None:
    config = make_config(num_experts=128, num_chosen=8)
    assert config.num_touched(0) == 0
    assert config.num_touched(1) == pytest.approx(8)
    # Two tokens share each of the 8 experts with a probability of 8 / 128.
    assert config.num_touched(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert 127.9 < config.num_touched(512) <= 128
    assert make_config(num_chosen=8).num_touched(1) == 8
