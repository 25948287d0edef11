"""Attention by FlashInfer's paged kernels, on CUDA devices."""

import flashinfer
import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool

WORKSPACE_BYTES = 256 * 2**20
# The kernels' dtypes; whatever else a pool has, the reference backend computes.
DTYPES = ("bfloat16", "float16")
# Hopper's own prefill kernels.
FA3_CAPABILITY = 9


class FlashInferAttention(AttentionBackend):
    """Plans with lengths and page tables on the host: from device tensors a plan would copy them back first, and wait.

    The pool is page-major, so a layer's keys and values are strided views, which FlashInfer takes as they are.
    """

    def __init__(self, pool: KvPool, num_q_heads: int) -> None:
        layout = pool.layout
        if layout.dtype not in DTYPES:
            raise ValueError(f"FlashInfer computes {' and '.join(DTYPES)}, not {layout.dtype}")
        self._layout = layout
        self._num_q_heads = num_q_heads
        self._device = pool.kv.device
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        # (num_pages, page_size, num_kv_heads, head_dim) each
        self._caches = [(pool.kv[:, layer, 0], pool.kv[:, layer, 1]) for layer in range(layout.num_layers)]
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        major, _ = torch.cuda.get_device_capability(self._device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa3" if major == FA3_CAPABILITY else "fa2"
        )
        # Grouped queries fill a tensor core's rows.
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self._wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper | flashinfer.BatchDecodeWithPagedKVCacheWrapper
        # For the write of new tokens, all int32 on the device: (num_tokens,) sequence and position of each token, and
        # the batch's page tables as FlashInfer has them.
        self._new_tokens: tuple[torch.Tensor, torch.Tensor] | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def plan(self, batch: Batch) -> None:
        layout = self._layout
        indices: list[int] = []
        kv_indptr, qo_indptr = [0], [0]
        last_page_lens = []
        sequence_of: list[int] = []
        position_of: list[int] = []
        for number, s in enumerate(batch.sequences):
            num_pages = layout.num_pages_for(s.device_len)
            indices.extend(s.page_ids[:num_pages])
            kv_indptr.append(len(indices))
            qo_indptr.append(qo_indptr[-1] + s.extend_len)
            last_page_lens.append(s.device_len - (num_pages - 1) * layout.page_size)
            sequence_of += [number] * s.extend_len
            position_of += range(s.cached_len, s.device_len)
        host_indptr, host_last = _int32(kv_indptr), _int32(last_page_lens)
        device_indices = self._to_device(_int32(indices))
        self._new_tokens = self._to_device(_int32(sequence_of)), self._to_device(_int32(position_of))
        self._tables = device_indices, self._to_device(host_indptr), self._to_device(host_last)
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

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        assert self._new_tokens is not None and self._tables is not None
        cache = self._caches[layer]
        indices, indptr, last_page_lens = self._tables
        flashinfer.append_paged_kv_cache(k, v, *self._new_tokens, cache, indices, indptr, last_page_lens, "NHD")
        return self._wrapper.run(q, cache).flatten(1)

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device, non_blocking=True)


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)
