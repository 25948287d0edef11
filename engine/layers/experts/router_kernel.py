"""Routing of rows to experts, fused with the norm before it (router.cu). Needs CUDA."""

from typing import NamedTuple

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch
from tandem.engine.layers.cuda_norm import rms_norm
from tandem.engine.layers.norm import Norm
from tandem.engine.models.experts import Routing

# More rows take the library's product and a kernel that only chooses.
MAX_FUSED_ROWS = 64
ROWS_OF_CLUSTER = 8
EXPERTS_OF_TILE = 16
MAX_CLUSTER = 8
WARPS = 16
MAX_EXPERTS = 512
MAX_CHOSEN = 32
MAX_GROUPS = 32
HIDDEN_MULTIPLE = 32
# Best experts of a group whose scores are added.
NUM_RANKED = 2


class Routed(NamedTuple):
    """
    Attributes:
        normed: (num_rows, hidden_size) bfloat16.
        weights: (num_rows, num_chosen) float32, from the best expert on.
        experts: (num_rows, num_chosen) int32; the lower expert wins ties.
    """

    normed: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor


class RouterKernel:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_fused = has_dependent_launch(device)
        self._kernels: dict[tuple[bool, int, int, Routing], CudaKernel] = {}

    def fits(self, num_experts: int, hidden_size: int, routing: Routing) -> bool:
        is_sigmoid, is_grouped = routing.scoring == "sigmoid", routing.num_groups_used < routing.num_groups
        return (
            hidden_size % HIDDEN_MULTIPLE == 0
            and num_experts <= MAX_EXPERTS
            and routing.num_chosen <= MAX_CHOSEN
            and (is_sigmoid or not (is_grouped or routing.has_bias))
            and (not is_grouped or (routing.num_groups <= MAX_GROUPS and routing.num_ranked == NUM_RANKED))
        )

    def route(
        self,
        x: torch.Tensor,
        norm: Norm,
        router: torch.Tensor,
        routing: Routing,
        bias: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        counted_rows: torch.Tensor | None = None,
    ) -> Routed:
        """Normalizes rows and chooses their experts, of a router that fits.

        Args:
            x: (num_rows, hidden_size) bfloat16, contiguous.
            router: (num_experts, hidden_size) bfloat16, contiguous.
            bias: (num_experts,) float32, for "sigmoid".
            counts: (num_experts,) int64, to which the number of rows that chose each expert is added.
            counted_rows: (3,) int32 on the device: rows below the first number are real, and rows from the second on
                below the third; None: all are. Others are not counted, have weights of 0 and choose expert
                `num_experts`, which does not exist.
        """
        num_rows, hidden_size = x.shape
        num_experts = len(router)
        assert x.is_contiguous() and router.is_contiguous() and self.fits(num_experts, hidden_size, routing)
        assert counts is None or counts.dtype is torch.int64
        weights = x.new_empty(num_rows, routing.num_chosen, dtype=torch.float32)
        experts = x.new_empty(num_rows, routing.num_chosen, dtype=torch.int32)
        is_fused = self._has_fused and num_rows <= MAX_FUSED_ROWS
        logits = None
        if is_fused:
            normed = torch.empty_like(x)
            grid = cluster_size(num_experts), -(-num_rows // ROWS_OF_CLUSTER)
        else:
            normed = rms_norm(x, norm)
            logits = torch.mm(normed, router.t(), out_dtype=torch.float32)
            grid = -(-num_rows // WARPS), 1
        self._kernel(is_fused, hidden_size, num_experts, routing).launch(
            grid,
            WARPS * 32,
            x,
            norm.weight,
            router,
            bias,
            normed,
            logits,
            weights,
            experts,
            counts,
            counted_rows,
            num_rows,
            norm.eps,
            float(routing.scaling),
        )
        return Routed(normed, weights, experts)

    def _kernel(self, is_fused: bool, hidden_size: int, num_experts: int, routing: Routing) -> CudaKernel:
        key = is_fused, hidden_size, num_experts, routing
        kernel = self._kernels.get(key)
        if kernel is None:
            is_grouped = routing.num_groups_used < routing.num_groups
            macros = {
                "FUSED": is_fused,
                "IN_SIZE": hidden_size,
                "NUM_EXPERTS": num_experts,
                "NUM_CHOSEN": routing.num_chosen,
                "SIGMOID": routing.scoring == "sigmoid",
                "NORMALIZE": routing.normalize,
                "GROUPS": routing.num_groups if is_grouped else 1,
                "GROUPS_USED": routing.num_groups_used if is_grouped else 1,
                "WARPS": WARPS,
                "CLUSTER": cluster_size(num_experts),
            }
            macros = {name: int(value) for name, value in macros.items()}
            kernel = self._kernels[key] = CudaKernel(__package__, "router", macros, self._device, shared_bytes=0)
        return kernel


def cluster_size(num_experts: int) -> int:
    num_tiles = -(-num_experts // EXPERTS_OF_TILE)
    return min(MAX_CLUSTER, 1 << (num_tiles - 1).bit_length())
