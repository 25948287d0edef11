"""Routing of rows to experts, fused with the norm before it (router.cu). Needs CUDA."""

from typing import Generic, NamedTuple, TypeVar

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch
from tandem.engine.layers.cuda_norm import rms_norm
from tandem.engine.layers.fp8_quantize import Quantized, empty_quantized, normalize_and_quantize, quantize_rows
from tandem.engine.layers.norm import Norm
from tandem.engine.models.experts import Routing
from tandem.engine.models.quantization import InputScales

# More rows take the library's product and a kernel that only chooses.
MAX_FUSED_ROWS = 64
# The same where registers hold a block's share of the router. Measured on an H200.
MAX_FUSED_ROWS_HELD = 128
ROWS_OF_CLUSTER = 8
# From MAX_FUSED_ROWS on, so that all clusters run at once.
ROWS_OF_LARGE_CLUSTER = 16
# As router.cu counts registers.
MAX_HELD = 12
# Shared memory holds the logits' parts of so many tiles of 16 rows.
MAX_TILES_OF_LARGE_CLUSTER = 2
# Shared memory holds the largest numbers of longer rows only in part.
MAX_QUANTIZED = 8192
EXPERTS_OF_TILE = 16
MAX_CLUSTER = 8
WARPS = 16
MAX_EXPERTS = 512
MAX_CHOSEN = 32
MAX_GROUPS = 32
HIDDEN_MULTIPLE = 32
# In the order of the kernel's macro.
INPUTS: tuple[InputScales, ...] = ("static", "token", "group")
# Best experts of a group whose scores are added.
NUM_RANKED = 2


Rows = TypeVar("Rows", torch.Tensor, Quantized)


class Routed(NamedTuple, Generic[Rows]):
    """
    Attributes:
        normed: (num_rows, hidden_size) bfloat16, or quantized.
        weights: (num_rows, num_chosen) float32, from the best expert on.
        experts: (num_rows, num_chosen) int32; the lower expert wins ties.
    """

    normed: Rows
    weights: torch.Tensor
    experts: torch.Tensor


class Variant(NamedTuple):
    """Attributes: rows: of a cluster; 0: the kernel only chooses."""

    rows: int
    inputs: InputScales | None


class RouterKernel:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_fused = has_dependent_launch(device)
        self._kernels: dict[tuple[Variant, int, int, Routing], CudaKernel] = {}

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
    ) -> Routed[torch.Tensor]:
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
        normed, fp8, weights, experts = self._route(x, norm, router, routing, bias, counts, counted_rows, None, None)
        assert normed is not None and fp8 is None
        return Routed(normed, weights, experts)

    def route_quantized(
        self,
        x: torch.Tensor,
        norm: Norm,
        router: torch.Tensor,
        routing: Routing,
        inputs: InputScales,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        counted_rows: torch.Tensor | None = None,
    ) -> Routed[Quantized]:
        """As route, and quantizes the normalized rows, rounded to bfloat16. Args: input_scale: (1,) float32 for
        "static" inputs."""
        normed, fp8, weights, experts = self._route(
            x, norm, router, routing, bias, counts, counted_rows, inputs, input_scale
        )
        if fp8 is None:
            assert normed is not None
            fp8 = quantize_rows(normed, inputs, input_scale)
        return Routed(fp8, weights, experts)

    def _route(
        self,
        x: torch.Tensor,
        norm: Norm,
        router: torch.Tensor,
        routing: Routing,
        bias: torch.Tensor | None,
        counts: torch.Tensor | None,
        counted_rows: torch.Tensor | None,
        inputs: InputScales | None,
        input_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, Quantized | None, torch.Tensor, torch.Tensor]:
        """Returns normalized rows in bfloat16, quantized, or both, the weights and the experts."""
        num_rows, hidden_size = x.shape
        num_experts = len(router)
        assert x.is_contiguous() and router.is_contiguous() and self.fits(num_experts, hidden_size, routing)
        assert counts is None or counts.dtype is torch.int64
        weights = x.new_empty(num_rows, routing.num_chosen, dtype=torch.float32)
        experts = x.new_empty(num_rows, routing.num_chosen, dtype=torch.int32)
        logits, normed, fp8 = None, None, None
        rows = rows_of_cluster(num_rows, hidden_size, num_experts) if self._has_fused else 0
        variant = Variant(rows, inputs if rows and hidden_size <= MAX_QUANTIZED else None)
        if rows:
            grid = cluster_size(num_experts), -(-num_rows // rows)
            if variant.inputs is None:
                normed = torch.empty_like(x)
            else:
                fp8 = empty_quantized(num_rows, hidden_size, variant.inputs, x.device)
        else:
            if inputs is None:
                normed = rms_norm(x, norm)
            else:
                normed, fp8 = normalize_and_quantize(x, norm, inputs, input_scale)
            logits = torch.mm(normed, router.t(), out_dtype=torch.float32)
            grid = -(-num_rows // WARPS), 1
        self._kernel(variant, hidden_size, num_experts, routing).launch(
            grid,
            WARPS * 32,
            x,
            norm.weight,
            router,
            bias,
            normed,
            None if fp8 is None else fp8.numbers,
            None if fp8 is None else fp8.scales,
            input_scale,
            logits,
            weights,
            experts,
            counts,
            counted_rows,
            num_rows,
            0 if fp8 is None else len(fp8.numbers),
            norm.eps,
            float(routing.scaling),
        )
        return normed, fp8, weights, experts

    def _kernel(self, variant: Variant, hidden_size: int, num_experts: int, routing: Routing) -> CudaKernel:
        key = variant, hidden_size, num_experts, routing
        kernel = self._kernels.get(key)
        if kernel is None:
            is_grouped = routing.num_groups_used < routing.num_groups
            macros = {
                "FUSED": variant.rows > 0,
                "ROWS": variant.rows,
                "INPUTS": 0 if variant.inputs is None else 1 + INPUTS.index(variant.inputs),
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


def rows_of_cluster(num_rows: int, hidden_size: int, num_experts: int) -> int:
    """Returns 0 if the library's product is faster."""
    if num_rows <= MAX_FUSED_ROWS:
        return ROWS_OF_CLUSTER
    num_tiles = -(-num_experts // (EXPERTS_OF_TILE * cluster_size(num_experts)))
    num_stretches = -(-hidden_size // (HIDDEN_MULTIPLE * WARPS))
    is_held = num_stretches * (2 * num_tiles + 1) <= MAX_HELD and num_tiles <= MAX_TILES_OF_LARGE_CLUSTER
    return ROWS_OF_LARGE_CLUSTER if is_held and num_rows <= MAX_FUSED_ROWS_HELD else 0


def cluster_size(num_experts: int) -> int:
    num_tiles = -(-num_experts // EXPERTS_OF_TILE)
    return min(MAX_CLUSTER, 1 << (num_tiles - 1).bit_length())
