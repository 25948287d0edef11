"""A mixture of experts by fused kernels, chosen by the number of rows alone. Needs CUDA."""

import torch

from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.experts.expert_products import ExpertMatrices
from tandem.engine.layers.experts.few_rows import FewRowsExperts
from tandem.engine.layers.experts.grouped import GroupedExperts
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.prefill import PrefillExperts
from tandem.engine.layers.experts.reference import mixture_of
from tandem.engine.layers.experts.router_kernel import RouterKernel, RoutingSpec
from tandem.engine.layers.norm import Norm

# Up to this many rows of an expert, reading its weights takes longer than multiplying.
MAX_GROUPED_ROWS = 64


class CudaExperts:
    """Other requests never change the choice, so a row's result depends on the number of rows, not on their content."""

    def __init__(self, device: torch.device) -> None:
        self._router = RouterKernel(device)
        self._few_rows = FewRowsExperts(device)
        self._grouped = GroupedExperts(device)
        self._prefill = PrefillExperts(device)

    def mixture(self, x: torch.Tensor, norm: Norm, experts: Experts) -> torch.Tensor:
        """Adds the chosen experts of rms_norm(x), without the shared one, to x: (num_tokens, hidden_size) bfloat16."""
        router, gate_up, down, first = experts.router, experts.gate_up, experts.down, experts.first
        routing = router.routing
        spec = RoutingSpec(
            routing.scoring,
            routing.num_chosen,
            routing.normalize,
            routing.scaling,
            routing.num_groups,
            routing.num_groups_used,
        )
        counts = experts.counts
        counted = (counts.counts, counts.counted_rows) if counts is not None else (None, None)
        normed, weights, chosen = self._router.route(x, norm, router.weight, spec, router.bias, *counted)
        num_rows, num_pairs = len(x), chosen.numel()
        if self._few_rows.fits(num_rows, routing.num_chosen, gate_up.weight, down.weight):
            return self._few_rows.forward(
                normed, weights, chosen, gate_up.weight, gate_up.scale, down.weight, down.scale, x, first
            )
        matrices = _matrices(gate_up), _matrices(down)
        has_many = num_pairs > MAX_GROUPED_ROWS * gate_up.num_experts
        if has_many and self._prefill.fits(normed, chosen, *matrices):
            return self._prefill.forward(normed, weights, chosen, *matrices, x, first)
        if self._grouped.fits(num_pairs, gate_up):
            return self._grouped.forward(normed, weights, chosen, gate_up, down, x, first)
        if self._prefill.fits(normed, chosen, *matrices):
            return self._prefill.forward(normed, weights, chosen, *matrices, x, first)
        return x.add_(mixture_of(normed, weights, chosen, experts))


def _matrices(linear: ExpertLinear) -> ExpertMatrices:
    return ExpertMatrices(linear.weight, linear.scale, linear.inputs or "token", linear.input_scale)
