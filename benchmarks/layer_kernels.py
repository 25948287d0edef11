"""The operations of a decode step's layers, each timed by itself. Imported on CUDA machines alone."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from engine.attention.layout import KvHeadLayout
from engine.attention.paged_decode import PagedDecode
from engine.floors import BYTES_PER_NUMBER, FP8_BYTES_PER_NUMBER
from engine.kvcache.cuda_pool import CudaKvPool
from engine.layers.cuda_ops import CudaOps
from engine.layers.fp8 import FP8_MAX
from engine.layers.fp8_linear import Fp8Linear
from engine.layers.linear import Linear, LinearBase
from engine.layers.norm import Norm, QkNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.models.config import ModelConfig
from engine.token_sequence import TokenSequence

PAGE_SIZE = 16
NUM_RUNS = 7
WEIGHT_SCALE = 0.02


class Measured(NamedTuple):
    """Attributes: time, floor: microseconds for one layer."""

    name: str
    time: float
    floor: float


class LayerKernels:
    """The operations of a model's layers at one batch size."""

    def __init__(self, model: ModelConfig, copy_bandwidth: float) -> None:
        """Args: copy_bandwidth: bytes read and written per second."""
        self._model = model
        self._bandwidth = copy_bandwidth
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._ops = CudaOps(self._device)
        self._norm = Norm(self._random(model.hidden_size), model.rms_norm_eps)

    def measure(self, batch_size: int, kv_len: int) -> Iterator[Measured]:
        """Args: kv_len: tokens of each sequence."""
        model, ops, norm = self._model, self._ops, self._norm
        q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden = self._random(batch_size, model.hidden_size)
        attended = self._random(batch_size, q_size)
        gated = self._random(batch_size, model.intermediate_size)
        qkv_size = q_size + 2 * kv_size
        yield self._products("norm and QKV", qkv_size, model.hidden_size, lambda w: ops.norm_linear(hidden, norm, w))
        yield self._attention(batch_size, kv_len)
        yield self._products(
            "output and residual", model.hidden_size, q_size, lambda w: ops.linear_add(attended, w, hidden)
        )
        yield self._products(
            "norm, gate, up and their product",
            2 * model.intermediate_size,
            model.hidden_size,
            lambda w: ops.norm_gated(hidden, norm, w),
        )
        yield self._products(
            "down and residual",
            model.hidden_size,
            model.intermediate_size,
            lambda w: ops.linear_add(gated, w, hidden),
        )

    def _products(self, name: str, num_out: int, num_in: int, run: Callable[[LinearBase], object]) -> Measured:
        linears = [self.linear(num_out, num_in) for _ in range(self._model.num_layers)]
        time = self.time(lambda: [run(linear) for linear in linears], len(linears))
        bytes_per_number = FP8_BYTES_PER_NUMBER if self._model.quantization else BYTES_PER_NUMBER
        return Measured(name, time, self._floor(num_out * num_in * bytes_per_number))

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

    def _attention(self, batch_size: int, kv_len: int) -> Measured:
        model = self._model
        layout = KvHeadLayout.of(model, PAGE_SIZE, "bfloat16")
        num_pages = layout.num_pages_for(kv_len)
        pool = CudaKvPool(layout, batch_size * num_pages, self._device)
        layout.view(pool.memory).normal_()
        pages = random.Random(0).sample(range(pool.num_pages), pool.num_pages)
        sequences = [
            TokenSequence([0] * kv_len, kv_len, pages[i * num_pages : (i + 1) * num_pages], cached_len=kv_len - 1)
            for i in range(batch_size)
        ]
        for sequence in sequences:
            sequence.extend(1)
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
        """Microseconds of one layer, in a CUDA graph. Args: run: launches that of so many."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        times = []
        for _ in range(NUM_RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / num_layers)
        return sorted(times)[NUM_RUNS // 2]

    def _floor(self, num_bytes: int) -> float:
        return num_bytes / self._bandwidth * 1e6

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).bfloat16()
