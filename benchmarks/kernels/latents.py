"""Times attention over latents by itself. Importing it requires CUDA."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.kernels.graph_time import median_us
from tandem.engine.attention.base import LatentHeads
from tandem.engine.attention.latent_kernels import attend
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_plan import decode_plans
from tandem.engine.attention.latent_triton import LatentTritonAttention
from tandem.engine.batch import Batch
from tandem.engine.floors import Limits
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed

# Sizes of DeepSeek's models.
KV_RANK, ROPE_DIM, NOPE_DIM, VALUE_DIM = 512, 64, 128, 128
PAGE_SIZE = 16
# Layers alternate until their latents exceed any cache.
CACHE_BYTES, MAX_LAYERS = 256 * 2**20, 64


class DecodeRow(NamedTuple):
    """
    Attributes:
        whole: microseconds of a layer's attention with its products to and from latents.
        attention: of this, attention alone.
        latents: microseconds to read the latents once.
        floor: as `latents`, or of the multiplications if these take longer.
    """

    num_heads: int
    batch_size: int
    kv_len: int
    whole: float
    attention: float
    latents: float
    floor: float


class PromptRow(NamedTuple):
    """Microseconds of a layer, by absorbed queries and by expanded keys and values."""

    num_heads: int
    num_new: int
    num_before: int
    absorbed: float
    expanded: float | None


class LatentKernels:
    def __init__(self, limits: Limits, quantized_to: str = "") -> None:
        """Args: quantized_to: as of LatentLayout."""
        self._limits = limits
        self._quantized_to = quantized_to
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._num_programs = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._norm = Norm(self._random(KV_RANK), 1e-6)

    def decode(self, num_heads: int, batch_size: int, kv_len: int) -> DecodeRow:
        num_bytes = batch_size * kv_len * self._layout(1).row_bytes
        num_layers = min(MAX_LAYERS, max(2, -(-CACHE_BYTES // num_bytes)))
        pool, sequences = self._sequences(num_layers, batch_size, kv_len, kv_len - 1)
        backend = LatentTritonAttention(pool, num_heads)
        whole = self._time(backend, Batch("decode", sequences), num_heads, num_layers)
        attention = self._time_attention(pool, sequences, num_heads, num_layers)
        flops = 2 * num_heads * (2 * KV_RANK + ROPE_DIM) * batch_size * kv_len
        latents = num_bytes / self._limits.copy_bandwidth * 1e6
        floor = max(latents, flops / self._limits.matmul_rate * 1e6)
        return DecodeRow(num_heads, batch_size, kv_len, whole, attention, latents, floor)

    def prompt(self, num_heads: int, num_new: int, num_before: int) -> PromptRow:
        num_layers = 2
        pool, sequences = self._sequences(num_layers, 1, num_before + num_new, num_before)
        batch, times = Batch("prefill", sequences), list[float | None]()
        for min_new_tokens in (num_new + 1, 0):
            backend = LatentTritonAttention(pool, num_heads)
            backend.expansion.min_new_tokens = min_new_tokens
            is_possible = min_new_tokens > num_new or backend.expansion.is_faster(sequences[0])
            times.append(self._time(backend, batch, num_heads, num_layers) if is_possible else None)
        absorbed, expanded = times
        assert absorbed is not None
        return PromptRow(num_heads, num_new, num_before, absorbed, expanded)

    def _time(self, backend: LatentTritonAttention, batch: Batch, num_heads: int, num_layers: int) -> float:
        backend.plan(batch)
        heads = [self._heads(num_heads) for _ in range(num_layers)]
        positions = batch.positions(self._device)
        last = max(s.device_len for s in batch.sequences)
        rotation = Rotation(RotaryEmbedding(ROPE_DIM, 1e4, None, last, self._device), positions, torch.bfloat16)
        q = self._random(batch.num_tokens, num_heads, NOPE_DIM + ROPE_DIM)
        kv = self._random(batch.num_tokens, KV_RANK + ROPE_DIM)
        return self._per_layer(
            lambda layer: backend.attend(q, kv, self._norm, rotation, heads[layer], layer), num_layers
        )

    def _time_attention(
        self, pool: CudaKvPool, sequences: list[TokenSequence], num_heads: int, num_layers: int
    ) -> float:
        plans = decode_plans(len(sequences), num_heads, self._num_programs)
        assert isinstance(pool.layout, LatentLayout)
        plan = plans.build(pool.layout, sequences)
        items, merges, pages = Packed(*plan.arrays).to(self._device)
        q = self._random(num_heads, len(sequences), KV_RANK)
        q_rope = self._random(len(sequences), num_heads, ROPE_DIM)
        parts = torch.empty(max(1, plan.num_parts), plans.tile_rows, KV_RANK, device=self._device)
        log_sums, out = torch.empty(parts.shape[:2], device=self._device), torch.empty_like(q)
        view = pool.layout.views(pool.memory_and_dummy)
        tables, scale = (items, merges, pages, parts, log_sums, plans.most_parts), (NOPE_DIM + ROPE_DIM) ** -0.5
        return self._per_layer(
            lambda layer: attend(q, q_rope, view, layer, *tables, scale, self._num_programs, out), num_layers
        )

    def _per_layer(self, run: Callable[[int], object], num_layers: int) -> float:
        return median_us(lambda: [run(layer) for layer in range(num_layers)]) / num_layers

    def _sequences(
        self, num_layers: int, count: int, length: int, cached_len: int
    ) -> tuple[CudaKvPool, list[TokenSequence]]:
        layout = self._layout(num_layers)
        num_pages = layout.num_pages_for(length)
        pool = CudaKvPool(layout, count * num_pages, self._device)
        # Numbers from -2 to 2, of 8 bits and of 16.
        pool.memory.random_(0, 256).bitwise_and_(0xBF)
        pages = random.Random(0).sample(range(pool.num_pages), pool.num_pages)
        sequences = []
        for number in range(count):
            own = pages[number * num_pages : (number + 1) * num_pages]
            sequences.append(TokenSequence([0] * length, length, own, cached_len=cached_len))
            sequences[-1].extend(length - cached_len)
        return pool, sequences

    def _layout(self, num_layers: int) -> LatentLayout:
        return LatentLayout(num_layers, PAGE_SIZE, KV_RANK, ROPE_DIM, "bfloat16", self._quantized_to)

    def _heads(self, num_heads: int) -> LatentHeads:
        keys, values = (self._random(num_heads, size, KV_RANK) * KV_RANK**-0.5 for size in (NOPE_DIM, VALUE_DIM))
        return LatentHeads(keys, values, (NOPE_DIM + ROPE_DIM) ** -0.5)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).bfloat16()
