"""Products of few queries with the projections of latents, fused with their neighbors (latent_queries.cu and
latent_outputs.cu). Needs CUDA."""

import torch

from tandem.engine.attention.latent_layout import LatentPages
from tandem.engine.attention.latent_plan import MAX_PARTS, MERGE_SIZE
from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import Rotation

# More tokens are left to libraries.
MAX_TOKENS = 4
NUM_THREADS = 256
# Numbers of a latent per block of queries, and blocks that share a head's outputs.
COLUMNS, CLUSTER = 64, 8
NOPE_MULTIPLE, MAX_NOPE = 32, 256


class LatentFewRows:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_kernels = has_dependent_launch(device)
        self._kernels: dict[tuple[str, tuple[int, ...]], CudaKernel] = {}

    def fits(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Args: q: (num_tokens, num_heads, nope_dim + rope_dim); keys, values: of LatentHeads."""
        nope_dim, kv_rank = keys.shape[1:]
        return (
            self._has_kernels
            and q.dtype is torch.bfloat16
            and 0 < len(q) <= MAX_TOKENS
            and nope_dim % NOPE_MULTIPLE == 0
            and nope_dim <= MAX_NOPE
            and kv_rank % COLUMNS == 0
            and values.shape[1] % CLUSTER == 0
        )

    def queries(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        keys: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        pages: LatentPages,
        layer: int,
        slots: torch.Tensor,
        kv_scale: float,
    ) -> torch.Tensor:
        """As latent_write.rotate_write, and returns absorbed queries, (num_heads, num_tokens, kv_rank)."""
        num_tokens, num_heads, q_dim = q.shape
        _, nope_dim, kv_rank = keys.shape
        latents = pages.latents
        is_quantized = latents.dtype is not torch.bfloat16
        assert q.is_contiguous() and kv.is_contiguous() and pages.keys.dtype is torch.bfloat16
        assert keys.stride()[1:] == (kv_rank, 1) and rotation.positions.dtype is torch.int32
        absorbed = q.new_empty(num_heads, num_tokens, kv_rank)
        num_chunks = kv_rank // COLUMNS
        macros = {
            "TOKENS": MAX_TOKENS,
            "NUM_HEADS": num_heads,
            "NOPE": nope_dim,
            "ROPE": q_dim - nope_dim,
            "RANK": kv_rank,
            "PAGE_SIZE": latents.shape[2],
            "FP8": int(is_quantized),
        }
        self._kernel("latent_queries", macros).launch(
            (num_chunks, num_heads + -(-num_tokens // num_chunks)),
            NUM_THREADS,
            q,
            kv,
            keys,
            norm.weight,
            rotation.tables.cos,
            rotation.tables.sin,
            rotation.positions,
            slots,
            absorbed,
            latents,
            num_tokens,
            keys.stride(0),
            latents.stride(0) * latents.itemsize,
            layer * latents.stride(1) * latents.itemsize,
            norm.eps,
            1.0 / kv_scale,
        )
        return absorbed

    def outputs(
        self,
        parts: torch.Tensor,
        log_sums: torch.Tensor,
        whole: torch.Tensor,
        merges: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Merges parts and multiplies each head's sum of latents by its values' projection.

        Args:
            parts, log_sums, merges: as of latent_kernels.attend, which has written the first two.
            whole: (num_heads, num_tokens, kv_rank): sums of the queries that have one part.
            values: of LatentHeads.
            out: (num_tokens, num_heads * value_dim), contiguous, overwritten.
        """
        num_heads, num_tokens, kv_rank = whole.shape
        value_dim = values.shape[1]
        assert values.stride()[1:] == (kv_rank, 1) and out.is_contiguous() and whole.is_contiguous()
        macros = {
            "TOKENS": MAX_TOKENS,
            "NUM_HEADS": num_heads,
            "RANK": kv_rank,
            "VALUE": value_dim,
            "TILE_ROWS": parts.shape[1],
            "MAX_PARTS": MAX_PARTS,
        }
        self._kernel("latent_outputs", macros).launch(
            (CLUSTER, num_heads),
            NUM_THREADS,
            parts,
            log_sums,
            whole,
            merges,
            values,
            out,
            num_tokens,
            len(merges) // MERGE_SIZE,
            values.stride(0),
        )

    def _kernel(self, name: str, macros: dict[str, int]) -> CudaKernel:
        key = name, tuple(macros.values())
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = CudaKernel(__package__, name, macros, self._device)
        return kernel
