from typing import NamedTuple

import torch

from tandem.engine.layers.experts.counts import LayerCounts
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.linear import LinearBase
from tandem.engine.models.experts import Routing


class Router(NamedTuple):
    """
    Attributes:
        weight: (num_experts, hidden_size) of the model's dtype.
        bias: (num_experts,) float32, added to the scores for the choice; None unless routing.has_bias.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    routing: Routing


class SharedExpert(NamedTuple):
    """
    Attributes:
        gate: (1, hidden_size) of the model's dtype; sigmoid(gate @ input) weighs the output. None: no weight.
    """

    gate_up: LinearBase
    down: LinearBase
    gate: torch.Tensor | None


class Experts(NamedTuple):
    """A layer's mixture of experts: weights of its share of the experts, and the whole router.

    Attributes:
        gate_up: rows of an expert are gate, then up.
        first: index of the first expert that gate_up and down hold. Others contribute nothing here.
        shared: None without a shared expert, or if another device computes it.
        counts: routing adds to them; None: it counts nothing.
    """

    router: Router
    gate_up: ExpertLinear
    down: ExpertLinear
    shared: SharedExpert | None = None
    first: int = 0
    counts: LayerCounts | None = None
