"""Compares the experts in a checkpoint with config.json's. Imports no torch."""

import re
from collections.abc import Iterable, Iterator, Set

from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.models.quantization import Quantization


def check_expert_count(tensors: Iterable[str], experts: ExpertsConfig) -> None:
    """Checks all layers together.

    Args:
        tensors: names of all tensors of the checkpoint.

    Raises:
        ValueError: there are more or fewer experts; the message names the key of config.json and both numbers.
    """
    names = experts.names
    projections = "|".join(map(re.escape, (names.gate, names.up, names.down)))
    # More digits are no index.
    of_expert = re.compile(rf"model\.layers\.\d+\.{re.escape(names.mlp)}\.experts\.(\d{{1,9}})\.(?:{projections})\.\w+")
    indices = {match[1] for tensor in tensors if (match := of_expert.fullmatch(tensor))}
    if not indices:
        raise ValueError(
            f"{experts.count_key} is {experts.num_experts}, but the weights have no tensor like "
            f"model.layers.0.{names.mlp}.experts.0.{names.gate}.weight"
        )
    num_found = max(map(int, indices)) + 1
    if num_found != experts.num_experts:
        raise ValueError(f"{experts.count_key} is {experts.num_experts}, but the weights have {num_found} experts")


def check_expert_weights(tensors: Set[str], experts: ExpertsConfig, num_layers: int) -> None:
    """Checks that each expert of each sparse layer has its weights.

    Args:
        tensors: names of all tensors of the checkpoint.

    Raises:
        ValueError: a weight is missing; the message names the first.
    """
    for layer in experts.sparse_layers(num_layers):
        for module in _modules(experts, layer):
            if f"{module}.weight" not in tensors:
                # The others are not counted: config.json may say any number.
                raise ValueError(f"tensor {module}.weight is missing")


def check_expert_quantization(quantization: Quantization, experts: ExpertsConfig, num_layers: int) -> None:
    """Raises ValueError if only some experts of a layer are FP8; the message names two modules."""
    for layer in experts.sparse_layers(num_layers):
        quantization.covers(list(_modules(experts, layer)))


def _modules(experts: ExpertsConfig, layer: int) -> Iterator[str]:
    names = experts.names
    for expert in range(experts.num_experts):
        for projection in (names.gate, names.up, names.down):
            yield f"model.layers.{layer}.{names.mlp}.experts.{expert}.{projection}"
