"""Products of few tokens whose weights are copied while earlier kernels run (few_rows_ring.cu). Needs CUDA."""

from collections.abc import Sequence
from typing import Any

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ring_plan import Ring, ring_of

# As the kernel's macro.
PLAIN, CHANNEL, BLOCKS = range(3)


class FewRowsRing:
    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._device = device
        self._num_sms = properties.multi_processor_count
        self._shared_memory = properties.shared_memory_per_block_optin
        self._kernels: dict[tuple[int, ...], CudaKernel] = {}

    def plan(self, num_tokens: int, linears: Sequence[LinearBase]) -> Ring | None:
        """Returns None if the kernel does not multiply these matrices, or not faster. Args: linears: one or two, of
        equal inputs; two have no biases."""
        kinds = {_kind(linear) for linear in linears}
        if len(linears) > 1 and kinds != {PLAIN}:
            return None
        out_sizes = [len(linear.weight) for linear in linears]
        is_fp8 = kinds != {PLAIN}
        return ring_of(out_sizes, linears[0].in_size, num_tokens, self._num_sms, self._shared_memory, is_fp8=is_fp8)

    def launch(
        self,
        ring: Ring,
        x: torch.Tensor,
        linears: Sequence[LinearBase],
        outs: Sequence[torch.Tensor],
        norm: Norm | None,
        add: bool,
    ) -> None:
        """Writes the projections of x, or of rms_norm(x). Args: ring: of `plan`; add: adds them to the one output."""
        first, second = linears[0], linears[1] if len(linears) > 1 else None
        macros = {
            "TOKENS": 1 << (len(x) - 1).bit_length(),
            "IN_SIZE": first.in_size,
            "SPLIT": ring.split,
            "STAGES": ring.num_stages,
            "UNITS": ring.num_units,
            "WARPS": ring.num_warps,
            "NORM": int(norm is not None),
            "ADD": int(add),
            "PAIR": int(second is not None),
            "FP8": _kind(first),
        }
        key = tuple(macros.values())
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = CudaKernel(
                __package__, "few_rows_ring", macros, self._device, shared_bytes=ring.shared_bytes
            )
        kernel.launch(
            (ring.num_blocks, 1),
            (ring.num_warps + 1) * 32,
            first.weight,
            first.scale if isinstance(first, Fp8Linear) else None,
            x,
            norm.weight if norm else None,
            first.bias,
            outs[0],
            None if second is None else second.weight,
            None if second is None else outs[1],
            len(x),
            len(first.weight),
            0 if second is None else len(second.weight),
            norm.eps if norm else 0.0,
        )


def _kind(linear: LinearBase) -> int:
    if not isinstance(linear, Fp8Linear):
        return PLAIN
    return BLOCKS if linear.is_block else CHANNEL
