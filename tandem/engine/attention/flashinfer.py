"""Attention by FlashInfer's paged kernels, on CUDA devices."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import flashinfer
import numpy as np
import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.cuda_ops import norm_rotate_write
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.request import Sequence

WORKSPACE_BYTES = 256 * 2**20
# The kernels' dtypes; whatever else a pool has, the reference backend computes.
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
# Hopper's own prefill kernels.
FA3_CAPABILITY = 9


class FlashInferAttention(AttentionBackend):
    """Plans with lengths and page tables on the host: from device tensors a plan would copy them back first, and wait.

    The pool is page-major, so a layer's keys and values are strided views, which FlashInfer takes as they are.
    """

    def __init__(self, pool: CudaKvPool, num_q_heads: int) -> None:
        layout = pool.layout
        if layout.dtype not in DTYPES:
            raise ValueError(f"FlashInfer computes {' and '.join(DTYPES)}, not {layout.dtype}")
        if layout.head_dim not in HEAD_DIMS:
            raise ValueError(f"FlashInfer computes heads of {', '.join(map(str, HEAD_DIMS))}, not {layout.head_dim}")
        self._layout = layout
        self._num_q_heads = num_q_heads
        self._device = pool.kv.device
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._pool = pool.all_kv
        # (num_pages + 1, page_size, num_kv_heads, head_dim) each: the dummy page is there too.
        self._caches = [(pool.all_kv[:, layer, 0], pool.all_kv[:, layer, 1]) for layer in range(layout.num_layers)]
        # Zero at first, as FlashInfer asks; all wrappers share it, for only one of them runs at a time.
        self._workspace = workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        major, _ = torch.cuda.get_device_capability(self._device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa3" if major == FA3_CAPABILITY else "fa2"
        )
        # Grouped queries fill a tensor core's rows.
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self._wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper | flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._slots = torch.empty(0)  # (num_tokens,) int64 on the device: where each new token goes

    def plan(self, batch: Batch) -> None:
        layout = self._layout
        indices = array("i")
        kv_indptr, qo_indptr = [0], [0]
        last_page_lens = []
        slots = []
        for s in batch.sequences:
            num_pages = layout.num_pages_for(s.device_len)
            pages = s.page_ids[:num_pages]
            indices.extend(pages)
            kv_indptr.append(len(indices))
            qo_indptr.append(qo_indptr[-1] + s.extend_len)
            last_page_lens.append(s.device_len - (num_pages - 1) * layout.page_size)
            new = np.arange(s.cached_len, s.device_len)
            slots.append(np.asarray(pages)[new // layout.page_size] * layout.page_size + new % layout.page_size)
        host_indptr, host_last = _int32(kv_indptr), _int32(last_page_lens)
        device_indices = self._to_device(_int32(indices))
        self._slots = self._to_device(torch.from_numpy(np.concatenate(slots)).pin_memory())
        heads = self._num_q_heads, layout.num_kv_heads, layout.head_dim
        dtypes = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        if batch.phase == "decode":
            self._wrapper = self._decode
            self._decode.plan(host_indptr, device_indices, host_last, *heads, layout.page_size, **dtypes)
        else:
            self._wrapper = self._prefill
            self._prefill.plan(
                _int32(qo_indptr),
                host_indptr,
                device_indices,
                host_last,
                *heads,
                layout.page_size,
                causal=True,
                **dtypes,
            )

    def attend(
        self, qkv: torch.Tensor, num_q_heads: int, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> torch.Tensor:
        q = norm_rotate_write(qkv, num_q_heads, rotation, qk_norm, self._pool, layer, self._slots)
        return self._wrapper.run(q, self._caches[layer]).flatten(1)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        keys, values = self._caches[layer]
        page_size = self._layout.page_size
        keys[self._slots // page_size, self._slots % page_size] = k
        values[self._slots // page_size, self._slots % page_size] = v
        return self._wrapper.run(q, self._caches[layer]).flatten(1)

    def for_graph(self, batch_size: int, indices: torch.Tensor) -> "GraphedDecode":
        """The same attention for decode steps of a fixed size, in fixed memory.

        Args:
            indices: int32 on the device, room for all page tables of a batch together; one for all sizes.
        """
        return GraphedDecode(
            self._pool, self._caches, self._layout, self._num_q_heads, self._workspace, batch_size, indices
        )

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device, non_blocking=True)


class GraphedDecode(AttentionBackend):
    """Decode attention whose tensors stay where they are, so that a CUDA graph of it can run again with other contents.

    Rows beyond the batch's own attend to one token of the dummy page, the page after the pool's last.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        layout: PageLayout,
        num_q_heads: int,
        workspace: torch.Tensor,
        batch_size: int,
        indices: torch.Tensor,
    ) -> None:
        self._pool = pool
        self._caches = caches
        self._layout = layout
        self._num_q_heads = num_q_heads
        self._batch_size = batch_size
        self._dummy_page = len(caches[0][0]) - 1
        self._dtype = caches[0][0].dtype
        device = workspace.device
        self._indptr = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
        self._indices = indices
        self._last_page_lens = torch.ones(batch_size, dtype=torch.int32, device=device)
        self._slots = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_lens,
        )

    def plan(self, batch: Batch) -> None:
        self._plan(batch.sequences)

    def plan_padding(self) -> None:
        """For a step that is all padding: nobody's pages are touched."""
        self._plan(())

    def _plan(self, sequences: SequenceOf[Sequence]) -> None:
        page_size = self._layout.page_size
        indices = array("i")
        indptr = [0]
        last_page_lens = []
        positions = []
        slots = []
        for s in sequences:
            num_pages = self._layout.num_pages_for(s.device_len)
            slots.append(s.page_ids[num_pages - 1] * page_size + s.cached_len % page_size)
            indices.extend(s.page_ids[:num_pages])
            indptr.append(len(indices))
            last_page_lens.append(s.device_len - (num_pages - 1) * page_size)
            positions.append(s.cached_len)
        num_padding = self._batch_size - len(sequences)
        indices.extend([self._dummy_page] * num_padding)
        indptr += range(indptr[-1] + 1, indptr[-1] + num_padding + 1)
        last_page_lens += [1] * num_padding
        positions += [0] * num_padding
        slots += [self._dummy_page * page_size] * num_padding
        self._slots.copy_(torch.tensor(slots, pin_memory=True), non_blocking=True)
        self.positions.copy_(_int32(positions), non_blocking=True)
        self._wrapper.plan(
            _int32(indptr),
            _int32(indices),
            _int32(last_page_lens),
            self._num_q_heads,
            self._layout.num_kv_heads,
            self._layout.head_dim,
            page_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def attend(
        self, qkv: torch.Tensor, num_q_heads: int, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> torch.Tensor:
        q = norm_rotate_write(qkv, num_q_heads, rotation, qk_norm, self._pool, layer, self._slots)
        return self._wrapper.run(q, self._caches[layer]).flatten(1)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        raise NotImplementedError("a graph runs the fused path alone")


def _int32(values: Iterable[int]) -> torch.Tensor:
    # An array first: torch takes four times as long over a list, and page tables are long.
    numbers = values if isinstance(values, array) else array("i", values)
    return torch.frombuffer(numbers, dtype=torch.int32).pin_memory()
