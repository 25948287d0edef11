"""Times a layer's projections with adapters, beside FlashInfer's segmented products. Importing it requires CUDA."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import flashinfer
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.graph_time import median_us
from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.ops import AdapterOps
from tandem.engine.adapters.rows import AdapterRows, Int32s
from tandem.engine.adapters.triton_products import TritonProducts
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.floors import Limits
from tandem.engine.layers.cuda_ops import CudaOps
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.config import ModelConfig

# Minimum size of the matrices and adapters that a graph reads, so that no cache holds them.
MIN_BYTES = 2**29
WORKSPACE_BYTES = 2**27
DTYPE = torch.bfloat16
EPS = 1e-5


class Row(NamedTuple):
    """Times of one layer in microseconds.

    Attributes:
        floor: for reading the adapters.
        base, adapted: of the projection, with its norm or sum, without adapters and with them.
        segmented: of FlashInfer's products with A and B, beside the base.
    """

    matrix: str
    num_tokens: int
    num_adapters: int
    floor: float
    base: float
    adapted: float
    segmented: float


class AdapterKernels:
    def __init__(self, model: ModelConfig, limits: Limits, num_slots: int, rank: int) -> None:
        self._limits = limits
        self._num_slots = num_slots
        self._rank = rank
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._ops = CudaOps(self._device)
        self._products = TritonProducts(self._device)
        self._norm = Norm(torch.ones(model.hidden_size, dtype=DTYPE, device=self._device), EPS)
        self._segmented = flashinfer.gemm.SegmentGEMMWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=self._device)
        )
        hidden, inner = model.hidden_size, model.intermediate_size
        q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self._shapes = {
            "qkv": ([q_size, kv_size, kv_size], hidden),
            "o": ([hidden], q_size),
            "gate_up": ([inner, inner], hidden),
            "down": ([hidden], inner),
        }

    def rows(self, num_tokens: int, num_adapters: int) -> Iterator[Row]:
        """Tokens take the adapters in turn."""
        for name in self._shapes:
            yield self._row(name, num_tokens, min(num_tokens, num_adapters))

    def _row(self, name: str, num_tokens: int, num_adapters: int) -> Row:
        out_sizes, in_size = self._shapes[name]
        linears = [self._linear(name) for _ in range(max(2, -(-MIN_BYTES // (2 * in_size * sum(out_sizes)))))]
        slots = [self._slots(num_tokens, num_adapters, n * num_adapters) for n in range(len(linears))]
        uses = [(one, AdapterRows.of(of_one, self._device)) for one, of_one in zip(linears, slots, strict=True)]
        x = torch.randn(num_tokens, in_size, device=self._device).to(DTYPE)
        residual = torch.zeros(num_tokens, sum(out_sizes), dtype=DTYPE, device=self._device)

        def run(ops: LayerOps, linear: LinearBase) -> object:
            if name == "qkv":
                return ops.norm_linear(x, self._norm, linear)
            if name == "gate_up":
                return ops.norm_gated(x, self._norm, linear)
            return ops.linear_add(x, linear, residual)

        def adapted() -> None:
            self._products.begin()
            for linear, rows in uses:
                run(AdapterOps(self._ops, self._products, rows), linear)

        num_bytes = 2 * self._rank * (len(out_sizes) * in_size + sum(out_sizes)) * num_adapters
        return Row(
            name,
            num_tokens,
            num_adapters,
            num_bytes / self._limits.copy_bandwidth * 1e6,
            median_us(lambda: [run(self._ops, linear) for linear in linears]) / len(linears),
            median_us(adapted) / len(linears),
            self._segmented_time(name, x, slots[0], len(linears)),
        )

    def _segmented_time(self, name: str, x: torch.Tensor, slots: Int32s, num_layers: int) -> float:
        """Rows come sorted, and all parts of A are one matrix."""
        out_sizes, in_size = self._shapes[name]
        found, counts = np.unique(slots, return_counts=True)
        ends = torch.tensor(np.concatenate(([0], np.cumsum(counts))), dtype=torch.int64, device=self._device)
        indices = torch.tensor(found, dtype=torch.int64, device=self._device)
        shape = self._num_slots, self._rank
        a = [self._random(shape[0], len(out_sizes) * shape[1], in_size) for _ in range(2)]
        b = [[self._random(*shape, size) for size in out_sizes] for _ in range(2)]
        shrunk = self._random(len(x), self._rank)

        def multiply(inputs: torch.Tensor, weights: torch.Tensor, *, is_column_major: bool) -> None:
            self._segmented.run(inputs, weights, len(found), is_column_major, seg_indptr=ends, weight_indices=indices)

        def run() -> None:
            for number in range(num_layers):
                multiply(x, a[number % 2], is_column_major=True)
                for of_part in b[number % 2]:
                    multiply(shrunk, of_part, is_column_major=False)

        return median_us(run) / num_layers

    def _slots(self, num_tokens: int, num_adapters: int, first: int) -> Int32s:
        if not num_adapters:
            return np.full(num_tokens, NO_ADAPTER, np.int32)
        return ((first + np.arange(num_tokens) % num_adapters) % self._num_slots).astype(np.int32)

    def _linear(self, name: str) -> Linear:
        out_sizes, in_size = self._shapes[name]
        linear = Linear(out_sizes, in_size, False, DTYPE, self._device)
        linear.weight.normal_(std=in_size**-0.5)
        weights = linear.adapters = AdapterWeights(out_sizes, in_size, self._num_slots, self._rank, DTYPE, self._device)
        weights.a.normal_(std=in_size**-0.5)
        weights.b.normal_(std=0.02)
        weights.ranks.fill_(self._rank)
        return linear

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self._device)


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    table = Table("matrix", title=title)
    for column in ("tokens", "adapters", "floor of adapters", "base", "with adapters", "FlashInfer, beside the base"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (row.floor, row.base, row.adapted, row.segmented)
        table.add_row(row.matrix, str(row.num_tokens), str(row.num_adapters), *(f"{time:.1f}" for time in times))
    console.print(table)
