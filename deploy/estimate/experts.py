"""Time and memory of a model's experts in one forward pass. docs/estimate.md explains the formulas and figures."""

from math import hypot
from typing import NamedTuple

from tandem.engine.floors import Limits, expert_flops, expert_weight_bytes
from tandem.engine.models.config import ModelConfig


class ExpertFactors(NamedTuple):
    """Costs of experts per weight format, fitted to single layers of Qwen3-30B-A3B's sizes on an H100, `layer_s` to its
    decode steps on an H200.

    Attributes:
        read_share: reached share of the copy rate.
        product_share: reached share of the matrix product rate.
        num_padded: rows that each touched expert multiplies beyond its own, because kernels multiply whole tiles. At
            most as many as it has, because tiles of few rows are small.
        layer_s: overhead per sparse layer beyond a dense one's: routing, sorting, adding up.
        launch_s: the same of the host, in a prefill without a graph.
    """

    read_share: float
    product_share: float
    num_padded: float
    layer_s: float
    launch_s: float


BFLOAT16_EXPERTS = ExpertFactors(1.0, 0.63, 64, 6e-6, 60e-6)
FP8_EXPERTS = ExpertFactors(1.0, 0.53, 64, 10e-6, 60e-6)


def num_sparse_layers(model: ModelConfig) -> int:
    return model.experts.num_sparse_layers(model.num_layers) if model.experts is not None else 0


def experts_s(model: ModelConfig, limits: Limits, factors: ExpertFactors, num_tokens: int) -> float:
    """Seconds that reading and multiplying the experts of num_tokens take in all layers."""
    if model.experts is None:
        return 0.0
    reading = expert_weight_bytes(model, num_tokens) / (limits.copy_bandwidth * factors.read_share)
    num_rows = num_tokens * model.experts.routing.num_chosen
    num_padded = min(num_rows, factors.num_padded * model.experts.num_touched(num_tokens))
    flops = expert_flops(model, num_tokens) * (1 + num_padded / num_rows)
    return hypot(reading, flops / (limits.matmul_rate * factors.product_share))


def mlp_numbers(model: ModelConfig, copies: int) -> int:
    """Activations of a prompt token that a forward pass holds at once, in numbers.

    Args:
        copies: copies of a dense or shared MLP's intermediate activations.
    """
    if model.experts is None:
        return copies * model.intermediate_size
    of_pairs = model.experts.routing.num_chosen * (model.experts.intermediate_size + model.hidden_size)
    of_dense = copies * model.intermediate_size if model.experts.dense_layers else 0
    return max(of_pairs, of_dense, copies * model.experts.shared_intermediate_size)
