"""Experts of few rows, each read once (few_rows_experts.cu). Needs CUDA."""

from typing import Any

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch
from tandem.engine.layers.experts.base import SharedExpert
from tandem.engine.layers.experts.few_rows_tuning import MAX_SHARED, UNIT_ROWS, Stages, Tuning, tuning_of
from tandem.engine.layers.experts.linear import KINDS, ExpertLinear, Kind
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import LinearBase

MAX_ROWS = 8
MAX_CHOSEN = 16
MAX_EXPERTS = 512
HIDDEN_MULTIPLE = 64
# Shared memory holds the rows.
MAX_HIDDEN = 8192
INTERMEDIATE_MULTIPLE = 16
# Parts of a shared expert, each of the size of the others.
MAX_SHARED_PARTS = 4


class FewRowsExperts:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        # Some GPUs after Hopper have less shared memory.
        self._has_kernel = has_dependent_launch(device) and properties.shared_memory_per_block_optin >= MAX_SHARED
        self._kernels: dict[tuple[bool, Kind, int, int, int, Tuning], CudaKernel] = {}

    def fits(self, num_rows: int, num_chosen: int, down: ExpertLinear) -> bool:
        num_experts, hidden_size, intermediate_size = down.weight.shape
        return (
            self._has_kernel
            and 0 < num_rows <= MAX_ROWS
            and num_chosen <= MAX_CHOSEN
            and num_experts <= MAX_EXPERTS
            and hidden_size % HIDDEN_MULTIPLE == 0
            and hidden_size <= MAX_HIDDEN
            and intermediate_size % INTERMEDIATE_MULTIPLE == 0
            and down.weight.dtype in (torch.bfloat16, FP8_DTYPE)
        )

    @staticmethod
    def fits_shared(shared: SharedExpert, down: ExpertLinear) -> bool:
        """Returns whether the kernels of these experts compute the shared one too."""
        size = down.weight.shape[2]
        num_parts, rest = divmod(shared.down.in_size, size)
        linears = shared.gate_up, shared.down
        return (
            shared.gate is None
            and not rest
            and 0 < num_parts <= MAX_SHARED_PARTS
            and all(_kind(linear) == down.kind for linear in linears)
            and all(linear.bias is None and linear.adapters is None for linear in linears)
        )

    def forward(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        residual: torch.Tensor,
        first_expert: int = 0,
        shared: SharedExpert | None = None,
    ) -> torch.Tensor:
        """Adds the experts' weighted outputs to `residual`, in ascending order of experts, and returns it.

        Args:
            x: (num_rows, hidden_size) bfloat16, normalized.
            weights: (num_rows, num_chosen) float32.
            experts: (num_rows, num_chosen) int32, distinct within a row. They and `weights` must be written by the
                kernel just before or by earlier ones.
            residual: (num_rows, hidden_size) bfloat16.
            first_expert: index of the first of these experts; others contribute nothing.
            shared: an expert that fits, added before the others; None: none.
        """
        gate_up_shared, down_shared = (None, None) if shared is None else (shared.gate_up, shared.down)
        hidden = self.gate_up(x, experts, gate_up, first_expert, gate_up_shared)
        return self.down(hidden, weights, experts, down, residual, first_expert, down_shared)

    def gate_up(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        linear: ExpertLinear,
        first_expert: int = 0,
        shared: LinearBase | None = None,
    ) -> torch.Tensor:
        """Returns silu(gate) * up, (num_rows, num_chosen + parts of the shared expert, intermediate_size); arbitrary
        for other experts."""
        intermediate_size = linear.weight.shape[1] // 2
        num_parts = 0 if shared is None else len(shared.weight) // (2 * intermediate_size)
        num_rows, num_chosen = experts.shape
        hidden = x.new_empty(num_rows, num_chosen + num_parts, intermediate_size)
        self._launch(False, linear, shared, num_parts, x, experts, None, hidden, intermediate_size, first_expert)
        return hidden

    def down(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        linear: ExpertLinear,
        residual: torch.Tensor,
        first_expert: int = 0,
        shared: LinearBase | None = None,
    ) -> torch.Tensor:
        """Must follow gate_up, which has waited for the kernel that writes `weights` and `experts`."""
        _, out_size, in_size = linear.weight.shape
        num_parts = 0 if shared is None else shared.in_size // in_size
        self._launch(True, linear, shared, num_parts, hidden, experts, weights, residual, out_size, first_expert)
        return residual

    def _launch(
        self,
        is_down: bool,
        linear: ExpertLinear,
        shared: LinearBase | None,
        num_parts: int,
        inputs: torch.Tensor,
        experts: torch.Tensor,
        shares: torch.Tensor | None,
        outputs: torch.Tensor,
        out_size: int,
        first_expert: int,
    ) -> None:
        weight = linear.weight
        assert all(t.is_contiguous() for t in (weight, inputs, experts, outputs))
        num_experts, _, in_size = weight.shape
        num_rows, num_chosen = experts.shape
        tuning = tuning_of(is_down, linear.kind != "plain", num_rows, in_size * weight.itemsize)
        num_tiles = out_size // (UNIT_ROWS if is_down else UNIT_ROWS // 2)
        if not is_down:
            num_tiles *= min(num_rows * num_chosen, num_experts) + num_parts
        self._kernel(is_down, linear.kind, num_rows, in_size, num_parts, tuning).launch(
            (min(num_tiles, self._num_sms), 1),
            (tuning.warps + 1) * 32,
            weight,
            linear.scale,
            None if shared is None else shared.weight,
            shared.scale if isinstance(shared, Fp8Linear) else None,
            inputs,
            experts,
            shares,
            outputs,
            num_rows,
            num_chosen,
            out_size,
            first_expert,
            num_experts,
        )

    def _kernel(
        self, is_down: bool, kind: Kind, num_rows: int, in_size: int, num_parts: int, tuning: Tuning
    ) -> CudaKernel:
        max_rows = 1 << (num_rows - 1).bit_length()
        key = is_down, kind, max_rows, in_size, num_parts, tuning
        kernel = self._kernels.get(key)
        if kernel is None:
            stages = Stages.of(is_down, kind != "plain", max_rows, in_size, tuning)
            macros = {
                "DOWN": int(is_down),
                "FP8": KINDS.index(kind),
                "ROWS": max_rows,
                "IN_SIZE": in_size,
                "CHUNK": stages.chunk,
                "STAGES": stages.num_stages,
                "WARPS": tuning.warps,
                "PREFETCH": tuning.prefetch,
                "RELEASE": tuning.release,
                "SHARED": num_parts,
            }
            kernel = CudaKernel(__package__, "few_rows_experts", macros, self._device, shared_bytes=stages.shared_bytes)
            self._kernels[key] = kernel
        return kernel


def _kind(linear: LinearBase) -> Kind:
    if not isinstance(linear, Fp8Linear):
        return "plain"
    return "block" if linear.is_block else "channel"
