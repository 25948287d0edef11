"""FlashInfer's kernels over the pages of one pool. Needs CUDA."""

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.attention.base import PlannedAttention
from tandem.engine.attention.flashinfer_parts import PartAttention
from tandem.engine.attention.flashinfer_wrapper import Wrapper, pinned
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.norm_rotate_write import norm_rotate_write
from tandem.engine.attention.page_tables import page_tables
from tandem.engine.attention.scales import KvScales
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device


class PagedKernels:
    """
    Attributes:
        sizes: head counts, head_dim and page_size, in plan order.
        dummy_page: the page after the pool's last.
        caches: keys and values of each layer, (num_pages + 1, page_size, num_kv_heads, head_dim) each.
    """

    def __init__(self, pool: CudaKvPool, layout: KvHeadLayout, num_q_heads: int, kv_scales: KvScales) -> None:
        self.layout = layout
        self._scales = kv_scales
        self._written_scales = kv_scales if layout.quantized_to else None
        dtype, page_dtype = (getattr(torch, name) for name in (layout.dtype, layout.page_dtype))
        self.sizes = num_q_heads, layout.num_kv_heads, layout.head_dim, layout.page_size
        self.dtypes: dict[str, torch.dtype] = {"q_data_type": dtype, "kv_data_type": page_dtype}
        self.dummy_page = pool.num_pages
        self._num_q_heads = num_q_heads
        kv = self._pool = layout.view(pool.memory_and_dummy)
        self.caches = [(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(layout.num_layers)]

    def tables(
        self, sequences: Sequence[TokenSequence], num_padding: int = 0, num_cut_pages: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns int32 indptr (num_rows + 1,) pinned, indices (num_pages,) on the device, last_page_lens (num_rows,)
        pinned. Padding rows are one token on the dummy page. Args: num_cut_pages: as of page_tables."""
        indices, indptr = page_tables(self.layout, sequences, num_cut_pages)
        indptr += range(len(indices), len(indices) + num_padding + 1)
        indices.extend([self.dummy_page] * num_padding)
        page_size = self.layout.page_size
        last_page_lens = [(s.device_len - 1) % page_size + 1 for s in sequences] + [1] * num_padding
        # For a graph, plan would copy host memory synchronously.
        on_device = to_device(np.array(indices, np.int32), self._pool.device)
        return pinned(indptr), on_device, pinned(last_page_lens)

    def attend(
        self,
        wrapper: Wrapper,
        slots: torch.Tensor,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
        parts: PartAttention | None = None,
    ) -> torch.Tensor:
        """As PlannedAttention.attend.

        Args:
            slots: (num_tokens,) int64.
            parts: None: the wrapper has planned all pages.
        """
        q = norm_rotate_write(
            qkv,
            self._num_q_heads,
            rotation,
            qk_norm,
            self._pool,
            layer,
            slots,
            kv_scales=self._written_scales,
            keep_kv=not wrapper.reads_pages,
        )
        if parts is not None:
            return parts.attend(wrapper, q, self.caches[layer], out)
        if wrapper.reads_pages:
            # k_scale joins the score scale; a v_scale of 1.0 costs nothing.
            scales = {"k_scale": self._scales.keys[layer], "v_scale": self._scales.values[layer]}
            return wrapper.run(q, self.caches[layer], out=out, **scales)
        num_kv_heads = self.layout.num_kv_heads
        _, k, v = qkv.split((self._num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        return wrapper.run(q, k, v, out=out)


class OverPages(PlannedAttention):
    """Attention that a wrapper has planned. Constructors set the attributes."""

    _paged: PagedKernels
    _wrapper: Wrapper
    _slots: torch.Tensor
    _parts: PartAttention | None = None

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._paged.attend(self._wrapper, self._slots, qkv, rotation, qk_norm, layer, out, self._parts)


class PlannedKernels(OverPages):
    def __init__(
        self, paged: PagedKernels, wrapper: Wrapper, slots: torch.Tensor, parts: PartAttention | None = None
    ) -> None:
        self._paged = paged
        self._wrapper = wrapper
        self._slots = slots
        self._parts = parts
