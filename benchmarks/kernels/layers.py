"""Times each operation of a model's layers by itself. Importing it requires CUDA."""

import random
from collections.abc import Callable, Iterator

import torch
from flashinfer.activation import silu_and_mul

from benchmarks.kernels.graph_time import median_us
from benchmarks.kernels.mixture import MixtureKernels
from benchmarks.kernels.stages import Measured, has_dense_layers
from tandem.engine.attention.flashinfer import FlashInferAttention
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.norm_rotate_write import norm_rotate_write
from tandem.engine.attention.page_tables import prefill_slots
from tandem.engine.attention.paged_decode import PagedDecode
from tandem.engine.batch import Batch
from tandem.engine.floors import BYTES_PER_NUMBER, FP8_BYTES_PER_NUMBER, FP8_SPEED, Limits, attention_flops
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.cuda_ops import CudaOps, rms_norm
from tandem.engine.layers.fp8 import FP8_MAX
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.layers.norm import Norm, QkNorm
from tandem.engine.layers.rotary import RotaryEmbedding, Rotation
from tandem.engine.models.config import ModelConfig
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device

PAGE_SIZE = 16
WEIGHT_SCALE = 0.02


class LayerKernels:
    def __init__(self, model: ModelConfig, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._ops = CudaOps(self._device)
        self._norm = Norm(self._random(model.hidden_size), model.rms_norm_eps)
        self._mixture = None
        if model.experts is not None:
            self._mixture = MixtureKernels(model, limits, self._ops, self._device, self.time)

    def decode_step(self, batch_size: int, kv_len: int) -> Iterator[Measured]:
        yield from self._products(batch_size)
        yield self._decode_attention(batch_size, kv_len)

    def prefill(self, num_prompts: int, prompt_len: int) -> Iterator[Measured]:
        num_tokens = num_prompts * prompt_len
        yield from self._products(num_tokens)
        yield from self._prefill_attention(num_prompts, prompt_len)
        model = self._model
        hidden = self._random(num_tokens, model.hidden_size)
        yield self._pass("of these: a norm", hidden.numel() * 2, lambda: rms_norm(hidden, self._norm))
        if model.quantization is None and has_dense_layers(model):
            projected = self._random(num_tokens, 2 * model.intermediate_size)
            num_moved = projected.numel() * 3 // 2
            yield self._pass("the gate's product", num_moved, lambda: silu_and_mul(projected))

    def _products(self, num_tokens: int) -> Iterator[Measured]:
        model, ops, norm = self._model, self._ops, self._norm
        q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden = self._random(num_tokens, model.hidden_size)
        attended = self._random(num_tokens, q_size)
        shape = q_size + 2 * kv_size, model.hidden_size
        yield self._product("norm and QKV", num_tokens, shape, lambda w: ops.norm_linear(hidden, norm, w))
        shape = model.hidden_size, q_size
        yield self._product("output and residual", num_tokens, shape, lambda w: ops.linear_add(attended, w, hidden))
        if has_dense_layers(model):
            yield from self._dense_mlp(hidden)
        if self._mixture is not None:
            yield from self._mixture.rows(hidden, norm)

    def _dense_mlp(self, hidden: torch.Tensor) -> Iterator[Measured]:
        model, ops, norm, num_tokens = self._model, self._ops, self._norm, len(hidden)
        gated = self._random(num_tokens, model.intermediate_size)
        name, shape = "norm, gate, up and their product", (2 * model.intermediate_size, model.hidden_size)
        yield self._product(name, num_tokens, shape, lambda w: ops.norm_gated(hidden, norm, w))
        shape = model.hidden_size, model.intermediate_size
        yield self._product("down and residual", num_tokens, shape, lambda w: ops.linear_add(gated, w, hidden))

    def _product(
        self, name: str, num_tokens: int, shape: tuple[int, int], run: Callable[[LinearBase], object]
    ) -> Measured:
        """Args: shape: (num_out, num_in) of the matrix."""
        num_out, num_in = shape
        linears = [self.linear(num_out, num_in) for _ in range(self._model.num_layers)]

        def run_all() -> None:
            for linear in linears:
                run(linear)

        bytes_per_number, speed = (
            (FP8_BYTES_PER_NUMBER, FP8_SPEED) if self._model.quantization else (BYTES_PER_NUMBER, 1)
        )
        num_bytes, flops = num_out * num_in * bytes_per_number, 2 * num_tokens * num_out * num_in / speed
        return Measured(name, self.time(run_all, len(linears)), self._floor(num_bytes, flops))

    def _pass(self, name: str, num_moved: int, run: Callable[[], object]) -> Measured:
        """Time a memory-bound operation. Args: num_moved: numbers read and written."""

        def run_all() -> None:
            for _ in range(self._model.num_layers):
                run()

        time = self.time(run_all, self._model.num_layers)
        return Measured(name, time, self._floor(num_moved * BYTES_PER_NUMBER), is_part=True)

    def linear(self, num_out: int, num_in: int) -> LinearBase:
        if self._model.quantization is None:
            plain = Linear([num_out], num_in, False, torch.bfloat16, self._device)
            plain.weight.normal_(0, WEIGHT_SCALE)
            return plain
        linear = Fp8Linear(["matrix"], [num_out], num_in, False, self._model.quantization, torch.bfloat16, self._device)
        linear.weight.copy_(torch.randn(num_out, num_in, device=self._device) * FP8_MAX / 5)
        linear.scale.fill_(5 * WEIGHT_SCALE / FP8_MAX)
        for parameter_name, parameter in linear.named_parameters("matrix"):
            if parameter_name.endswith("input_scale"):
                parameter.fill_(8 / FP8_MAX)
        linear.loaded()
        return linear

    def _prefill_attention(self, num_prompts: int, prompt_len: int) -> Iterator[Measured]:
        model = self._model
        layout = KvHeadLayout.of(model, PAGE_SIZE, "bfloat16")
        num_pages = layout.num_pages_for(prompt_len)
        pool = CudaKvPool(layout, num_prompts * num_pages, self._device)
        sequences = _sequences(num_prompts, prompt_len, num_pages, cached_len=0)
        batch = Batch("prefill", sequences)
        attention = FlashInferAttention(pool, model.num_q_heads)
        attention.plan(batch)
        tables = RotaryEmbedding(model.head_dim, model.rope_theta, model.rope_scaling, prompt_len, self._device)
        rotation = Rotation(tables, batch.positions(self._device), torch.bfloat16)
        num_heads = model.num_q_heads + 2 * model.num_kv_heads
        qkv = self._random(batch.num_tokens, num_heads, model.head_dim)
        qk_norm = QkNorm(self._random(2, model.head_dim), model.rms_norm_eps) if model.qk_norm else None

        def attend_all() -> None:
            for layer in range(model.num_layers):
                attention.attend(qkv, rotation, qk_norm, layer)

        flops = num_prompts * attention_flops(model, prompt_len) / model.num_layers
        time = self.time(attend_all, model.num_layers)
        yield Measured("rotation, page write and attention", time, self._floor(0, flops))
        slots = to_device(prefill_slots(layout, sequences), self._device)
        view = layout.view(pool.memory_and_dummy)
        # All heads are read and written; keys and values go to their pages too.
        num_moved = batch.num_tokens * model.head_dim * (2 * num_heads + 2 * model.num_kv_heads)
        yield self._pass(
            "of that rotation and page write",
            num_moved,
            lambda: norm_rotate_write(
                qkv, model.num_q_heads, rotation, qk_norm, view, 0, slots, kv_scales=None, keep_kv=True
            ),
        )

    def _decode_attention(self, batch_size: int, kv_len: int) -> Measured:
        model = self._model
        layout = KvHeadLayout.of(model, PAGE_SIZE, "bfloat16")
        num_pages = layout.num_pages_for(kv_len)
        pool = CudaKvPool(layout, batch_size * num_pages, self._device)
        layout.view(pool.memory).normal_()
        sequences = _sequences(batch_size, kv_len, num_pages, cached_len=kv_len - 1)
        decode = PagedDecode(pool, model.num_q_heads, batch_size)
        (plan,) = decode.plan(sequences, batch_size).to(self._device)
        tables = RotaryEmbedding(model.head_dim, model.rope_theta, model.rope_scaling, kv_len, self._device)
        rotation = Rotation(tables, plan[decode.plans.positions(batch_size)], torch.bfloat16)
        qkv = self._random(batch_size, model.num_q_heads + 2 * model.num_kv_heads, model.head_dim)
        qk_norm = QkNorm(self._random(2, model.head_dim), model.rms_norm_eps) if model.qk_norm else None
        time = self.time(
            lambda: [decode.launch(plan, qkv, rotation, qk_norm, layer) for layer in range(model.num_layers)],
            model.num_layers,
        )
        kv_numbers = batch_size * kv_len * 2 * model.num_kv_heads * model.head_dim
        return Measured("attention, all of it", time, self._floor(kv_numbers * BYTES_PER_NUMBER))

    def time(self, run: Callable[[], object], num_layers: int) -> float:
        """Return the median microseconds of one layer in a CUDA graph. Args: run: launches `num_layers` layers."""
        return median_us(run) / num_layers

    def _floor(self, num_bytes: float, flops: float = 0) -> float:
        return max(num_bytes / self._limits.copy_bandwidth, flops / self._limits.matmul_rate) * 1e6

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).bfloat16()


def _sequences(count: int, length: int, num_pages: int, cached_len: int) -> list[TokenSequence]:
    pages = random.Random(0).sample(range(count * num_pages), count * num_pages)
    sequences = [
        TokenSequence([0] * length, length, pages[i * num_pages : (i + 1) * num_pages], cached_len=cached_len)
        for i in range(count)
    ]
    for sequence in sequences:
        sequence.extend(length - cached_len)
    return sequences
