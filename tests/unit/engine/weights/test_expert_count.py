from dataclasses import replace

import pytest

from tandem.engine.models.experts import ExpertNames, ExpertsConfig, Routing
from tandem.engine.models.quantization import Quantization
from tandem.engine.weights.expert_count import check_expert_count, check_expert_quantization, check_expert_weights

EXPERTS = ExpertsConfig(4, 16, Routing("softmax", 2))
MIXTRAL = ExpertsConfig(
    4,
    16,
    Routing("softmax", 2),
    names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    count_key="num_local_experts",
)


def names(num_experts: int, mlp: str = "mlp", projections: tuple[str, ...] = ("gate_proj", "down_proj")) -> list[str]:
    of_experts = [f"{expert}.{part}" for expert in range(num_experts) for part in projections]
    return [
        "model.embed_tokens.weight",
        *(f"model.layers.{layer}.{mlp}.experts.{name}.weight" for layer in (0, 1) for name in of_experts),
    ]


def test_takes_the_configured_number() -> None:
    check_expert_count(names(4), EXPERTS)
    check_expert_count(names(4, "block_sparse_moe", ("w2",)), MIXTRAL)
    # Names of other modules do not count, nor do indices that are too long for one.
    check_expert_count([*names(4), "model.layers.0.mlp.experts.9.router.weight", "experts.9.up_proj.weight"], EXPERTS)
    check_expert_count([*names(4), f"model.layers.0.mlp.experts.{'9' * 5000}.up_proj.weight"], EXPERTS)


@pytest.mark.parametrize("num_found", [1, 3, 5, 128])
def test_names_the_key_and_both_numbers(num_found: int) -> None:
    with pytest.raises(ValueError, match=f"^num_experts is 4, but the weights have {num_found} experts$"):
        check_expert_count(names(num_found), EXPERTS)
    with pytest.raises(ValueError, match=f"^num_local_experts is 4, but the weights have {num_found} experts$"):
        check_expert_count(names(num_found, "block_sparse_moe", ("w1", "w3")), MIXTRAL)


@pytest.mark.parametrize("stored", [["model.layers.0.mlp.experts.gate_up_proj"], ["model.layers.0.mlp.up_proj.weight"]])
def test_names_a_tensor_if_there_are_no_experts(stored: list[str]) -> None:
    message = "^num_experts is 4, but the weights have no tensor like model.layers.0.mlp.experts.0.gate_proj.weight$"
    with pytest.raises(ValueError, match=message):
        check_expert_count(stored, EXPERTS)


ALL = ("gate_proj", "up_proj", "down_proj")


def test_every_sparse_layer_has_every_expert() -> None:
    stored = frozenset(names(4, projections=ALL))
    check_expert_weights(stored, EXPERTS, 2)
    check_expert_weights(frozenset(names(4, "block_sparse_moe", ("w1", "w2", "w3"))), MIXTRAL, 2)
    lacking = "model.layers.1.mlp.experts.2.up_proj.weight"
    with pytest.raises(ValueError, match=f"^tensor {lacking} is missing$"):
        check_expert_weights(stored - {lacking}, EXPERTS, 2)
    # Scales alone are no weights.
    with pytest.raises(ValueError, match=f"^tensor {lacking} is missing$"):
        check_expert_weights(stored - {lacking} | {f"{lacking}_scale"}, EXPERTS, 2)
    first = "model.layers.2.mlp.experts.0.gate_proj.weight"
    with pytest.raises(ValueError, match=f"^tensor {first} is missing$"):
        check_expert_weights(stored, EXPERTS, 3)
    check_expert_weights(stored, replace(EXPERTS, dense_layers=(2,)), 3)


def test_experts_of_a_layer_are_all_fp8_or_none() -> None:
    for ignored in ((), ("lm_head", "model.layers.0.mlp.gate"), ("model.layers.1.mlp.experts",), ("re:.*experts",)):
        check_expert_quantization(Quantization(ignored=ignored), EXPERTS, 2)
    up = "model.layers.1.mlp.experts.2.up_proj"
    message = f"^quantization_config ignores {up}, but not model.layers.1.mlp.experts.0.gate_proj: "
    with pytest.raises(ValueError, match=message):
        check_expert_quantization(Quantization(ignored=(up,)), EXPERTS, 2)
    check_expert_quantization(Quantization(ignored=(up,)), replace(EXPERTS, dense_layers=(1,)), 2)
