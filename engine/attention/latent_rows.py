"""A pool of latents as rows of one token in one layer, in plain torch."""

import torch

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.paged_rows import token_rows
from tandem.engine.attention.quantization import Quantizer
from tandem.engine.attention.scales import KvScales


class LatentRows:
    """Reads and writes rows, which are at::

        page * per_page + layer * page_size + offset in page

    Attributes:
        per_page: rows from one page to the next.
    """

    def __init__(self, layout: LatentLayout, memory: torch.Tensor, kv_scales: KvScales | None) -> None:
        """Args: memory: of a KvPool; kv_scales: None: all ones."""
        self._layout = layout
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        # (num_rows, row_bytes) uint8 if latents are quantized, else (num_rows, kv_rank + rope_dim).
        self._rows, self.per_page = token_rows(memory, layout.row_bytes)
        self._quantizers: list[Quantizer] = []
        if layout.quantized_to:
            scales = kv_scales or KvScales.ones(layout.num_layers)
            self._quantizers = [Quantizer(layout, scale, memory.device) for scale in scales.keys]
        else:
            self._rows = self._rows.view(self._dtype)

    def write(self, rows: torch.Tensor, layer: int, latents: torch.Tensor, k_rope: torch.Tensor) -> None:
        """
        Args:
            rows: (num_tokens,) int64, layer 0's.
            latents: (num_tokens, kv_rank), normalized.
            k_rope: (num_tokens, rope_dim), rotated.
        """
        if self._quantizers:
            latents, k_rope = self._quantizers[layer].quantized(latents), k_rope.contiguous().view(torch.uint8)
        self._rows.index_copy_(0, rows + layer * self._layout.page_size, torch.cat((latents, k_rope), dim=-1))

    def read(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns (num_rows, kv_rank + rope_dim) of the compute dtype. Args: rows: (num_rows,) int64, layer 0's."""
        gathered = self._rows.index_select(0, rows + layer * self._layout.page_size)
        if not self._quantizers:
            return gathered
        latents, k_rope = gathered.split(
            (self._layout.latent_bytes, self._layout.row_bytes - self._layout.latent_bytes), -1
        )
        return torch.cat((self._quantizers[layer].numbers(latents), k_rope.view(self._dtype)), dim=-1)
