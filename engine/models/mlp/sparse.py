import re
from collections.abc import Iterator

import torch

from tandem.engine.layers.experts.base import Experts, Router, SharedExpert
from tandem.engine.layers.experts.counts import LayerCounts
from tandem.engine.layers.experts.linear import ExpertLinear, ExpertShare, check_expert_sizes
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.models.linears import Linears
from tandem.engine.models.mlp.base import Mlp
from tandem.engine.models.quantization import BLOCK


class SparseMlp(Mlp):
    """A mixture of experts. All experts' matrices of a kind are one tensor."""

    def __init__(self, linears: Linears, share: ExpertShare | None = None, counts: LayerCounts | None = None) -> None:
        """
        Args:
            share: the experts to hold; None: all.

        Raises:
            ValueError: only some experts are FP8, or sizes do not fit FP8.
        """
        config, dtype, device = linears.config, linears.dtype, linears.device
        assert config.experts is not None
        experts, hidden = config.experts, config.hidden_size
        self._config: ExpertsConfig = experts
        self._names = experts.names
        whole = ExpertShare(0, experts.num_experts, 0, experts.intermediate_size)
        self._share = share if share is not None else whole
        held = range(self._share.first, self._share.first + self._share.num_experts)
        self._gate_up_names = [self._of_expert(i, self._names.gate, self._names.up) for i in held]
        self._down_names = [self._of_expert(i, self._names.down) for i in held]
        first = [linears.module(name) for name in (*self._gate_up_names[0], *self._down_names[0])]
        quantization = linears.quantization(
            [linears.module(name) for names in (*self._gate_up_names, *self._down_names) for name in names]
        )
        check_expert_sizes(first[:2], [self._share.size] * 2, hidden, quantization)
        check_expert_sizes(first[2:], [hidden], self._share.size, quantization)
        gate_up = ExpertLinear(len(held), [self._share.size] * 2, hidden, quantization, dtype, device)
        down = ExpertLinear(len(held), [hidden], self._share.size, quantization, dtype, device)
        bias = torch.empty(experts.num_experts, device=device) if experts.routing.has_bias else None
        router = Router(torch.empty(experts.num_experts, hidden, dtype=dtype, device=device), bias, experts.routing)
        self._experts = Experts(router, gate_up, down, self._shared(linears), self._share.first, counts)
        of_expert = "|".join(map(re.escape, (self._names.gate, self._names.up, self._names.down)))
        self._expert_name = re.compile(rf"{re.escape(self._names.mlp)}\.experts\.(\d+)\.({of_expert})\.(\w+)")

    def forward(self, x: torch.Tensor, norm: Norm, ops: LayerOps) -> torch.Tensor:
        return ops.mixture(x, norm, self._experts)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of_all_tokens()
        yield from self._experts.gate_up.named_parameters(self._gate_up_names)
        yield from self._experts.down.named_parameters(self._down_names)

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of_all_tokens()
        yield from self._experts.gate_up.stacked_parameters(f"{self._names.mlp}.experts.gate_up")
        yield from self._experts.down.stacked_parameters(f"{self._names.mlp}.experts.down")

    def held_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        match = self._expert_name.fullmatch(name)
        if match is None or int(match[1]) >= self._config.num_experts:
            return tensor
        share, projection, kind = self._share, match[2], match[3]
        if not share.first <= int(match[1]) < share.first + share.num_experts:
            return None
        if share.size == self._config.intermediate_size or tensor.dim() != 2:
            return tensor
        offset, size = share.offset, share.size
        if kind == "weight_scale":
            if not self._experts.down.is_block:
                # One scale per output: a projection's outputs are intermediate, or all held.
                return tensor if projection == self._names.down else tensor[offset : offset + size]
            offset, size = offset // BLOCK, size // BLOCK
        return tensor[:, offset : offset + size] if projection == self._names.down else tensor[offset : offset + size]

    def loaded(self) -> None:
        self._experts.gate_up.loaded()
        self._experts.down.loaded()
        if self._experts.shared is not None:
            self._experts.shared.gate_up.loaded()
            self._experts.shared.down.loaded()

    @property
    def kind(self) -> tuple[type, ...]:
        dtypes = type(self._experts.gate_up.inputs), type(self._experts.shared)
        return SparseMlp, *dtypes

    def _shared(self, linears: Linears) -> SharedExpert | None:
        size, hidden = self._config.shared_intermediate_size, linears.config.hidden_size
        if not size:
            return None
        gate = torch.empty(1, hidden, dtype=linears.dtype, device=linears.device) if self._config.shared_gate else None
        gate_up = linears.make(self._shared_names("gate_proj", "up_proj"), [size] * 2, hidden, False)
        return SharedExpert(gate_up, linears.make(self._shared_names("down_proj"), [hidden], size, False), gate)

    def _of_all_tokens(self) -> Iterator[tuple[str, torch.Tensor]]:
        mlp, router, shared = self._names.mlp, self._experts.router, self._experts.shared
        yield f"{mlp}.{self._names.router}.weight", router.weight
        if router.bias is not None:
            yield f"{mlp}.{self._names.bias}", router.bias
        if shared is None:
            return
        yield from shared.gate_up.named_parameters(*self._shared_names("gate_proj", "up_proj"))
        yield from shared.down.named_parameters(*self._shared_names("down_proj"))
        if shared.gate is not None:
            yield f"{mlp}.{self._names.shared_gate}.weight", shared.gate

    def _of_expert(self, expert: int, *projections: str) -> tuple[str, ...]:
        return tuple(f"{self._names.mlp}.experts.{expert}.{projection}" for projection in projections)

    def _shared_names(self, *projections: str) -> tuple[str, ...]:
        return tuple(f"{self._names.mlp}.{self._names.shared}.{projection}" for projection in projections)
