"""Times the products of adapters, beside FlashInfer's segmented products. Importing it requires CUDA."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import flashinfer
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.graph_time import median_us
from tandem.engine.adapters.rows import AdapterRows
from tandem.engine.adapters.triton_products import TritonProducts
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.floors import Limits
from tandem.engine.models.config import ModelConfig

# Minimum size of the adapters that a graph reads, so that no cache holds them.
MIN_BYTES = 2**28
WORKSPACE_BYTES = 2**27
DTYPE = torch.bfloat16


class Row(NamedTuple):
    """Times of one layer in microseconds.

    Attributes:
        floor: for reading the adapters.
        expand: with the gate of "gate_up", and with a read of the base's product.
        segmented: of FlashInfer's products, without sum and gate.
    """

    matrix: str
    num_tokens: int
    num_adapters: int
    floor: float
    shrink: float
    expand: float
    segmented: float


class AdapterKernels:
    def __init__(self, model: ModelConfig, limits: Limits, num_slots: int, rank: int) -> None:
        self._limits = limits
        self._num_slots = num_slots
        self._rank = rank
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._products = TritonProducts(self._device)
        self._segmented = flashinfer.gemm.SegmentGEMMWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=self._device)
        )
        hidden, inner = model.hidden_size, model.intermediate_size
        q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self._shapes = {
            "qkv": ((q_size, kv_size, kv_size), hidden),
            "o": ((hidden,), q_size),
            "gate_up": ((inner, inner), hidden),
            "down": ((hidden,), inner),
        }

    def rows(self, num_tokens: int, num_adapters: int) -> Iterator[Row]:
        """Tokens take the adapters in turn."""
        for name in self._shapes:
            yield self._row(name, num_tokens, num_adapters)

    def _row(self, name: str, num_tokens: int, num_adapters: int) -> Row:
        out_sizes, in_size = self._shapes[name]
        num_read = min(num_tokens, num_adapters)
        num_bytes = 2 * self._rank * (len(out_sizes) * in_size + sum(out_sizes)) * num_read
        # Layers read other slots in turn.
        num_layers = -(-MIN_BYTES // num_bytes)
        num_sets = max(1, self._num_slots // num_read)
        layers = [self._weights(name) for _ in range(-(-num_layers // num_sets))]
        sets = [self._slots(num_tokens, num_read, number * num_read) for number in range(num_sets)]
        rows = [AdapterRows.of(slots, self._device) for slots in sets]
        uses = [(weights, of_set) for weights in layers for of_set in rows][:num_layers]
        x = torch.randn(num_tokens, in_size, device=self._device).to(DTYPE)
        out = torch.randn(num_tokens, sum(out_sizes), device=self._device).to(DTYPE)
        shrunk = self._products.shrink(x, layers[0], rows[0])

        def expand(weights: AdapterWeights, of_set: AdapterRows) -> object:
            if name == "gate_up":
                return self._products.expand_gated(shrunk, weights, of_set, out)
            return self._products.expand(shrunk, weights, of_set, out)

        return Row(
            name,
            num_tokens,
            num_adapters,
            num_bytes / self._limits.copy_bandwidth * 1e6,
            _time(uses, lambda weights, of_set: self._products.shrink(x, weights, of_set)),
            _time(uses, expand),
            self._segmented_time(name, x, sets[0], len(uses)),
        )

    def _segmented_time(self, name: str, x: torch.Tensor, slots: np.ndarray, num_layers: int) -> float:
        """Rows come sorted, and all parts of A are one matrix."""
        out_sizes, in_size = self._shapes[name]
        rank, num_slots = self._rank, self._num_slots
        found, counts = np.unique(slots, return_counts=True)
        lens = torch.tensor(np.concatenate(([0], np.cumsum(counts))), dtype=torch.int64, device=self._device)
        indices = torch.tensor(found, dtype=torch.int64, device=self._device)
        a = [self._random(num_slots, len(out_sizes) * rank, in_size) for _ in range(2)]
        b = [[self._random(num_slots, rank, size) for size in out_sizes] for _ in range(2)]
        shrunk = [self._random(len(x), rank) for _ in out_sizes]
        run = self._segmented.run

        def once(number: int) -> None:
            run(x, a[number % 2], len(found), True, seg_indptr=lens, weight_indices=indices)
            for of_part, inputs in zip(b[number % 2], shrunk, strict=True):
                run(inputs, of_part, len(found), False, seg_indptr=lens, weight_indices=indices)

        return median_us(lambda: [once(number) for number in range(num_layers)]) / num_layers

    def _slots(self, num_tokens: int, num_adapters: int, first: int) -> np.ndarray:
        return (first + np.arange(num_tokens, dtype=np.int32) % num_adapters).astype(np.int32)

    def _weights(self, name: str) -> AdapterWeights:
        out_sizes, in_size = self._shapes[name]
        weights = AdapterWeights(out_sizes, in_size, self._num_slots, self._rank, DTYPE, self._device)
        weights.a.normal_(std=in_size**-0.5)
        weights.b.normal_(std=0.02)
        weights.ranks.fill_(self._rank)
        return weights

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self._device)


def _time(
    uses: Sequence[tuple[AdapterWeights, AdapterRows]], run: Callable[[AdapterWeights, AdapterRows], object]
) -> float:
    return median_us(lambda: [run(*use) for use in uses]) / len(uses)


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    table = Table("matrix", title=title)
    for column in ("tokens", "adapters", "floor", "shrink", "expand", "FlashInfer"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.4g}" for value in row))
    console.print(table)
