"""A mixture of experts by fused kernels, chosen by sizes and the number of rows alone. Needs CUDA."""

import torch

from tandem.engine.layers.cuda_norm import rms_norm
from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.experts.few_rows import FewRowsExperts
from tandem.engine.layers.experts.grouped import GroupedExperts
from tandem.engine.layers.experts.prefill import PrefillExperts
from tandem.engine.layers.experts.reference import choose, mixture_of
from tandem.engine.layers.experts.router_kernel import Routed, RouterKernel
from tandem.engine.layers.fp8_quantize import Quantized
from tandem.engine.layers.norm import Norm

# From this many rows of an expert on, the kernels of prefills are faster.
MIN_PREFILL_ROWS = 64


class CudaExperts:
    """Other requests never change the choice, so a row's result depends on the number of rows, not on their content."""

    def __init__(self, device: torch.device) -> None:
        self._router = RouterKernel(device)
        self._few_rows = FewRowsExperts(device)
        self._grouped = GroupedExperts(device)
        self._prefill = PrefillExperts(device)

    def captures(self, experts: Experts) -> bool:
        """Returns False if plain torch computes the experts, or their choice, and waits for the device."""
        return self._chooses(experts) and self._grouped.fits(experts.gate_up)

    def adds_shared(self, num_rows: int, experts: Experts) -> bool:
        """Returns whether `mixture` of so many rows adds the shared expert too."""
        shared, num_chosen = experts.shared, experts.router.routing.num_chosen
        if shared is None or not self._few_rows.fits(num_rows, num_chosen, experts.down):
            return False
        return self._few_rows.fits_shared(shared, experts.down)

    def mixture(
        self, x: torch.Tensor, norm: Norm, experts: Experts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds the chosen experts of rms_norm(x) to `residual`, and the shared one if adds_shared.

        Args:
            x: (num_tokens, hidden_size) bfloat16.
            residual: contiguous; None: x.
        """
        gate_up, down, first = experts.gate_up, experts.down, experts.first
        residual = x if residual is None else residual
        num_chosen = experts.router.routing.num_chosen
        if self._few_rows.fits(len(x), num_chosen, down):
            shared = experts.shared if self.adds_shared(len(x), experts) else None
            return self._few_rows.forward(*self._route(x, norm, experts), gate_up, down, residual, first, shared)
        has_many = len(x) * num_chosen >= MIN_PREFILL_ROWS * gate_up.num_experts
        if has_many and self._prefill.fits(x, num_chosen, gate_up, down):
            normed, weights, chosen = self._route_inputs(x, norm, experts)
            return self._prefill.forward(normed, weights, chosen, gate_up, down, residual, first)
        if self._grouped.fits(gate_up):
            normed, weights, chosen = self._route_inputs(x, norm, experts)
            return self._grouped.forward(normed, weights, chosen, gate_up, down, residual, first)
        return residual.add_(mixture_of(*self._route(x, norm, experts), experts))

    def _chooses(self, experts: Experts) -> bool:
        num_experts, hidden_size = experts.router.weight.shape
        return self._router.fits(num_experts, hidden_size, experts.router.routing)

    def _route(self, x: torch.Tensor, norm: Norm, experts: Experts) -> Routed[torch.Tensor]:
        if self._chooses(experts):
            weight, bias, routing = experts.router
            return self._router.route(x, norm, weight, routing, bias, *_counted(experts))
        normed = rms_norm(x, norm)
        weights, chosen = choose(normed, experts)
        return Routed(normed, weights, chosen.int())

    def _route_inputs(self, x: torch.Tensor, norm: Norm, experts: Experts) -> Routed[torch.Tensor] | Routed[Quantized]:
        """Quantizes the normalized rows for FP8 weights."""
        inputs, input_scale = experts.gate_up.inputs, experts.gate_up.input_scale
        if inputs is None or not self._chooses(experts):
            return self._route(x, norm, experts)
        weight, bias, routing = experts.router
        return self._router.route_quantized(x, norm, weight, routing, inputs, input_scale, bias, *_counted(experts))


def _counted(experts: Experts) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    counts = experts.counts
    return (None, None) if counts is None else (counts.counts, counts.counted_rows)
