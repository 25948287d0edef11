"""Makes a layer's matrices: plain or FP8, as the configuration says, whole or the part of a rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.part import Part, Ranges
from tandem.engine.models.quantization import BLOCK, Quantization
from tandem.engine.ranks.config import SINGLE_RANK, RankConfig


class HeldProjections(NamedTuple):
    """One merged matrix, and what this rank holds of it.

    Attributes:
        modules: names of the projections, like model.layers.0.self_attn.q_proj.
        rows: the outputs of each projection.
        columns: the inputs of all.
    """

    modules: tuple[str, ...]
    rows: tuple[range, ...]
    columns: range
    linear: LinearBase


@dataclass(frozen=True, slots=True)
class Linears:
    """
    Attributes:
        layer: its index.
        dtype: of plain weights and biases.
        parts: the cut tensors so far, by name below model.layers.N.
        made: all matrices so far.
    """

    config: ModelConfig
    layer: int
    dtype: torch.dtype
    device: torch.device
    ranks: RankConfig = SINGLE_RANK
    parts: dict[str, Part] = field(default_factory=dict)
    made: list[HeldProjections] = field(default_factory=list)

    def make(
        self,
        names: Sequence[str],
        out_sizes: list[int],
        in_size: int,
        bias: bool,
        rows: Sequence[range] | None = None,
        columns: range | None = None,
    ) -> LinearBase:
        """Makes one matrix of merged projections.

        Args:
            names: below model.layers.N.
            out_sizes, in_size: of the whole projections.
            rows: the outputs of each projection that this rank computes; None: all.
            columns: the inputs that this rank has; None: all.

        Raises:
            ValueError: only some of the projections are FP8, or sizes do not fit FP8.
        """
        modules = [self.module(name) for name in names]
        quantization = self.quantization(modules)
        whole_rows = [range(size) for size in out_sizes]
        held_rows = whole_rows if rows is None else list(rows)
        held_columns = range(in_size) if columns is None else columns
        sizes = [len(held) for held in held_rows]
        linear: LinearBase
        if quantization is None:
            linear = Linear(sizes, len(held_columns), bias, self.dtype, self.device)
        else:
            linear = Fp8Linear(modules, sizes, len(held_columns), bias, quantization, self.dtype, self.device)
        for name, whole, held in zip(names, whole_rows, held_rows, strict=True):
            self._cut_projection(name, (len(whole), in_size), held, held_columns, quantization)
        if len(held_columns) < in_size:
            # One rank's bias alone is added.
            linear.is_partial, linear.adds_bias = True, self.ranks.is_leader
        self.made.append(HeldProjections(tuple(modules), tuple(held_rows), held_columns, linear))
        return linear

    def cut(self, name: str, whole: tuple[int, ...], *ranges: Ranges) -> tuple[int, ...]:
        """Notes the part of a tensor that this rank holds, and returns its shape.

        Args:
            name: below model.layers.N.
            ranges: as Part has them.
        """
        part = Part(whole, ranges)
        if part.shape != whole:
            self.parts[name] = part
        return part.shape

    def module(self, name: str) -> str:
        return f"model.layers.{self.layer}.{name}"

    def quantization(self, modules: Sequence[str]) -> Quantization | None:
        """Returns None for plain modules. Raises ValueError if only some are FP8."""
        quantization = self.config.quantization
        return quantization if quantization is not None and quantization.covers(modules) else None

    def _cut_projection(
        self, name: str, whole: tuple[int, int], rows: range, columns: range, quantization: Quantization | None
    ) -> None:
        """Notes the parts of all tensors that a projection may have."""
        self.cut(f"{name}.weight", whole, (rows,), (columns,))
        self.cut(f"{name}.bias", whole[:1], (rows,))
        if quantization is None:
            return
        if quantization.weights == "block":
            blocks = (whole[0] // BLOCK, whole[1] // BLOCK)
            self.cut(f"{name}.weight_scale", blocks, (in_blocks(rows),), (in_blocks(columns),))
        else:
            self.cut(f"{name}.weight_scale", (whole[0], 1), (rows,), None)


def in_blocks(numbers: range) -> range:
    """Returns the blocks of a scale each that the numbers fill."""
    assert not (numbers.start % BLOCK or numbers.stop % BLOCK)
    return range(numbers.start // BLOCK, numbers.stop // BLOCK)
