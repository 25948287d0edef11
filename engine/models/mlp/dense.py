from collections.abc import Iterator

import torch

from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.linears import Linears
from tandem.engine.models.mlp.base import Mlp

_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = ("mlp.down_proj",)


class DenseMlp(Mlp):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, linears: Linears) -> None:
        config = linears.config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        held = linears.ranks.share(intermediate)
        sizes, bias = [intermediate] * 2, config.mlp_bias
        self._gate_up: LinearBase = linears.make(_GATE_UP, sizes, hidden, bias, rows=[held, held])
        self._down: LinearBase = linears.make(_DOWN, [hidden], intermediate, bias, columns=held)

    def forward(self, x: torch.Tensor, norm: Norm, ops: LayerOps) -> torch.Tensor:
        return ops.gated_mlp(x, norm, self._gate_up, self._down)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._gate_up.named_parameters(*_GATE_UP)
        yield from self._down.named_parameters(*_DOWN)

    def projections(self) -> Iterator[str]:
        yield from (*_GATE_UP, *_DOWN)

    def loaded(self) -> None:
        self._gate_up.loaded()
        self._down.loaded()

    @property
    def kind(self) -> tuple[type, ...]:
        return DenseMlp, type(self._gate_up), type(self._down)
