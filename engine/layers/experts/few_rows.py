"""Experts of few rows, each read once (few_rows_experts.cu). Needs CUDA."""

from typing import Any

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch
from tandem.engine.layers.experts.few_rows_tuning import MAX_SHARED, UNIT_ROWS, Stages, Tuning, tuning_of

MAX_ROWS = 8
MAX_CHOSEN = 16
MAX_EXPERTS = 512
HIDDEN_MULTIPLE = 64
# Shared memory holds the rows.
MAX_HIDDEN = 8192
INTERMEDIATE_MULTIPLE = 16
BLOCK = 128


class FewRowsExperts:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        # Some GPUs after Hopper have less shared memory.
        self._has_kernel = has_dependent_launch(device) and properties.shared_memory_per_block_optin >= MAX_SHARED
        self._kernels: dict[tuple[bool, int, int, int, Tuning], CudaKernel] = {}

    def fits(self, num_rows: int, num_chosen: int, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """
        Args:
            gate_up: (num_experts, 2 * intermediate_size, hidden_size), bfloat16 or float8_e4m3fn.
            down: (num_experts, hidden_size, intermediate_size).
        """
        num_experts, hidden_size, intermediate_size = down.shape
        return (
            self._has_kernel
            and 0 < num_rows <= MAX_ROWS
            and num_chosen <= MAX_CHOSEN
            and num_experts <= MAX_EXPERTS
            and hidden_size % HIDDEN_MULTIPLE == 0
            and hidden_size <= MAX_HIDDEN
            and intermediate_size % INTERMEDIATE_MULTIPLE == 0
            and gate_up.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        )

    def forward(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor | None,
        down: torch.Tensor,
        down_scale: torch.Tensor | None,
        residual: torch.Tensor,
        first_expert: int = 0,
    ) -> torch.Tensor:
        """Adds the experts' weighted outputs to `residual`, in ascending order of experts, and returns it.

        Args:
            x: (num_rows, hidden_size) bfloat16, normalized.
            weights: (num_rows, num_chosen) float32.
            experts: (num_rows, num_chosen) int32, distinct within a row. They and `weights` must be written by the
                kernel just before or by earlier ones.
            gate_up: (num_experts, 2 * intermediate_size, hidden_size), bfloat16 or float8_e4m3fn.
            gate_up_scale: float32 scales of FP8 weights: (num_experts, rows, 1), or for blocks of BLOCK numbers
                (num_experts, rows / BLOCK, columns / BLOCK).
            down: (num_experts, hidden_size, intermediate_size).
            residual: (num_rows, hidden_size) bfloat16.
            first_expert: index of the first of these experts; others contribute nothing.
        """
        hidden = self.gate_up(x, experts, gate_up, gate_up_scale, first_expert)
        return self.down(hidden, weights, experts, down, down_scale, residual, first_expert)

    def gate_up(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        first_expert: int = 0,
    ) -> torch.Tensor:
        """Return silu(gate) * up, (num_rows, num_chosen, intermediate_size); arbitrary for other experts."""
        intermediate_size = weight.shape[1] // 2
        hidden = x.new_empty(*experts.shape, intermediate_size)
        self._launch(False, weight, scale, x, experts, None, hidden, intermediate_size, first_expert)
        return hidden

    def down(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        residual: torch.Tensor,
        first_expert: int = 0,
    ) -> torch.Tensor:
        """Must follow gate_up, which has waited for the kernel that writes `weights` and `experts`."""
        self._launch(True, weight, scale, hidden, experts, weights, residual, weight.shape[1], first_expert)
        return residual

    def _launch(
        self,
        is_down: bool,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        inputs: torch.Tensor,
        experts: torch.Tensor,
        shares: torch.Tensor | None,
        outputs: torch.Tensor,
        out_size: int,
        first_expert: int,
    ) -> None:
        assert all(t.is_contiguous() for t in (weight, inputs, experts, outputs))
        num_experts, _, in_size = weight.shape
        num_rows, num_chosen = experts.shape
        fp8 = 0 if scale is None else 1 if scale.shape[2] == 1 and scale.shape[1] == weight.shape[1] else 2
        tuning = tuning_of(is_down, fp8 > 0, num_rows, in_size * weight.itemsize)
        num_tiles = out_size // (UNIT_ROWS if is_down else UNIT_ROWS // 2)
        if not is_down:
            num_tiles *= min(num_rows * num_chosen, num_experts)
        self._kernel(is_down, fp8, num_rows, in_size, tuning).launch(
            (min(num_tiles, self._num_sms), 1),
            (tuning.warps + 1) * 32,
            weight,
            scale,
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

    def _kernel(self, is_down: bool, fp8: int, num_rows: int, in_size: int, tuning: Tuning) -> CudaKernel:
        max_rows = 1 << (num_rows - 1).bit_length()
        key = is_down, fp8, max_rows, in_size, tuning
        kernel = self._kernels.get(key)
        if kernel is None:
            stages = Stages.of(is_down, fp8 > 0, max_rows, in_size, tuning)
            macros = {
                "DOWN": int(is_down),
                "FP8": fp8,
                "ROWS": max_rows,
                "IN_SIZE": in_size,
                "CHUNK": stages.chunk,
                "STAGES": stages.num_stages,
                "WARPS": tuning.warps,
                "PREFETCH": tuning.prefetch,
                "RELEASE": tuning.release,
            }
            kernel = CudaKernel(__package__, "few_rows_experts", macros, self._device, shared_bytes=stages.shared_bytes)
            self._kernels[key] = kernel
        return kernel
