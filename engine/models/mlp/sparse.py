import re
from collections.abc import Iterator

import torch

from tandem.engine.layers.experts.base import Experts, Router, SharedExpert
from tandem.engine.layers.experts.counts import LayerCounts
from tandem.engine.layers.experts.linear import ExpertLinear, ExpertShare, check_expert_sizes
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.models.linears import Linears, in_blocks
from tandem.engine.models.mlp.base import Mlp
from tandem.engine.models.part import Ranges
from tandem.engine.models.quantization import BLOCK, Quantization
from tandem.engine.ranks.checks import cuts_by_expert
from tandem.engine.ranks.config import RankConfig


class SparseMlp(Mlp):
    """A mixture of experts. All experts' matrices of a kind are one tensor."""

    def __init__(self, linears: Linears, share: ExpertShare | None = None, counts: LayerCounts | None = None) -> None:
        """
        Args:
            share: the experts to hold; None: those of the rank.

        Raises:
            ValueError: only some experts are FP8, sizes do not fit FP8, or the share is no part of the experts.
        """
        config, dtype, device = linears.config, linears.dtype, linears.device
        assert config.experts is not None
        experts, hidden = config.experts, config.hidden_size
        self._config: ExpertsConfig = experts
        self._names = experts.names
        self._prefix = linears.module("")
        self._share = share if share is not None else _share_of(config, experts, linears.ranks)
        # Ranks cut it as a dense MLP.
        self._has_shared = self._share.has_shared or linears.ranks.degree > 1
        quantization = linears.quantization([linears.module(name) for name in self._of_experts()])
        self._share.check(experts, quantization)
        held = range(self._share.first, self._share.first + self._share.num_experts)
        self._gate_up_names = [self._of_expert(i, self._names.gate, self._names.up) for i in held]
        self._down_names = [self._of_expert(i, self._names.down) for i in held]
        first = [linears.module(name) for name in (*self._gate_up_names[0], *self._down_names[0])]
        check_expert_sizes(first[:2], [self._share.size] * 2, hidden, quantization)
        check_expert_sizes(first[2:], [hidden], self._share.size, quantization)
        gate_up = ExpertLinear(len(held), [self._share.size] * 2, hidden, quantization, dtype, device)
        down = ExpertLinear(len(held), [hidden], self._share.size, quantization, dtype, device)
        bias = torch.empty(experts.num_experts, device=device) if experts.routing.has_bias else None
        router = Router(torch.empty(experts.num_experts, hidden, dtype=dtype, device=device), bias, experts.routing)
        shared = self._shared(linears) if self._has_shared else None
        self._cut_stacks(linears, quantization)
        self._experts = Experts(router, gate_up, down, shared, self._share.first, counts)
        # Both its projections and its gate.
        self._of_shared = (f"{self._names.mlp}.{self._names.shared}.", f"{self._names.mlp}.{self._names.shared_gate}.")
        of_expert = "|".join(map(re.escape, (self._names.gate, self._names.up, self._names.down)))
        self._expert_name = re.compile(rf"{re.escape(self._names.mlp)}\.experts\.(\d+)\.({of_expert})\.(\w+)")

    def forward(self, x: torch.Tensor, norm: Norm, ops: LayerOps) -> torch.Tensor:
        return ops.mixture(x, norm, self._experts)

    def is_capturable(self, ops: LayerOps) -> bool:
        return ops.captures(self._experts)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of_all_tokens()
        yield from self._experts.gate_up.named_parameters(self._gate_up_names)
        yield from self._experts.down.named_parameters(self._down_names)

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of_all_tokens()
        yield from self._experts.gate_up.stacked_parameters(f"{self._names.mlp}.experts.gate_up")
        yield from self._experts.down.stacked_parameters(f"{self._names.mlp}.experts.down")

    def projections(self) -> Iterator[str]:
        yield from self._of_experts()
        if self._config.shared_intermediate_size:
            yield from self._shared_names("gate_proj", "up_proj", "down_proj")

    def held_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        share, config = self._share, self._config
        if config.shared_intermediate_size and not self._has_shared and name.startswith(self._of_shared):
            return None
        match = self._expert_name.fullmatch(name)
        if match is None or int(match[1]) >= config.num_experts:
            return tensor
        if not share.first <= int(match[1]) < share.first + share.num_experts:
            return None
        if share.size == config.intermediate_size or tensor.dim() != 2:
            return tensor
        is_down, unit = match[2] == self._names.down, 1
        if match[3] == "weight_scale":
            if self._experts.down.is_block:
                unit = BLOCK
            elif is_down:
                # One scale per output, and all outputs are held.
                return tensor
        axis, num_wanted = int(is_down), config.intermediate_size // unit
        if tensor.shape[axis] != num_wanted:
            raise ValueError(
                f"tensor {self._prefix}{name} has shape {tuple(tensor.shape)}, not {num_wanted} "
                f"{'columns' if is_down else 'rows'}"
            )
        return tensor.narrow(axis, share.offset // unit, share.size // unit)

    def loaded(self) -> None:
        self._experts.gate_up.loaded()
        self._experts.down.loaded()
        if self._experts.shared is not None:
            self._experts.shared.gate_up.loaded()
            self._experts.shared.down.loaded()

    @property
    def kind(self) -> tuple[type, ...]:
        shared = self._experts.shared
        of_shared = () if shared is None else (type(shared.gate_up), type(shared.down))
        return SparseMlp, type(self._experts.gate_up.inputs), *of_shared

    def _shared(self, linears: Linears) -> SharedExpert | None:
        size, hidden = self._config.shared_intermediate_size, linears.config.hidden_size
        if not size:
            return None
        gate = torch.empty(1, hidden, dtype=linears.dtype, device=linears.device) if self._config.shared_gate else None
        held = linears.ranks.share(size)
        names = self._shared_names("gate_proj", "up_proj")
        gate_up = linears.make(names, [size] * 2, hidden, False, rows=[held, held])
        down = linears.make(self._shared_names("down_proj"), [hidden], size, False, columns=held)
        return SharedExpert(gate_up, down, gate)

    def _cut_stacks(self, linears: Linears, quantization: Quantization | None) -> None:
        """Notes the parts of the stacked parameters. Those of single experts are held_part's."""
        share, config = self._share, self._config
        hidden, size = linears.config.hidden_size, config.intermediate_size
        experts, numbers = (
            range(share.first, share.first + share.num_experts),
            range(share.offset, share.offset + share.size),
        )
        gate_up, down = (f"{self._names.mlp}.experts.{kind}" for kind in ("gate_up", "down"))

        def cut(name: str, rows: int, columns: int, held_rows: Ranges, held_columns: Ranges) -> None:
            linears.cut(name, (config.num_experts, rows, columns), (experts,), held_rows, held_columns)

        cut(f"{gate_up}.weight", 2 * size, hidden, _twice(numbers, size), None)
        cut(f"{down}.weight", hidden, size, None, (numbers,))
        if quantization is None:
            return
        if quantization.weights == "block":
            blocks, num_blocks = in_blocks(numbers), size // BLOCK
            cut(f"{gate_up}.weight_scale", 2 * num_blocks, hidden // BLOCK, _twice(blocks, num_blocks), None)
            cut(f"{down}.weight_scale", hidden // BLOCK, num_blocks, None, (blocks,))
        else:
            cut(f"{gate_up}.weight_scale", 2 * size, 1, _twice(numbers, size), None)
            cut(f"{down}.weight_scale", hidden, 1, None, None)
        if quantization.inputs == "static":
            for name, num_projections in ((gate_up, 2), (down, 1)):
                linears.cut(f"{name}.input_scale", (config.num_experts, num_projections), (experts,), None)

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

    def _of_experts(self) -> Iterator[str]:
        for expert in range(self._config.num_experts):
            yield from self._of_expert(expert, self._names.gate, self._names.up, self._names.down)

    def _of_expert(self, expert: int, *projections: str) -> tuple[str, ...]:
        return tuple(f"{self._names.mlp}.experts.{expert}.{projection}" for projection in projections)

    def _shared_names(self, *projections: str) -> tuple[str, ...]:
        return tuple(f"{self._names.mlp}.{self._names.shared}.{projection}" for projection in projections)


def _share_of(config: ModelConfig, experts: ExpertsConfig, ranks: RankConfig) -> ExpertShare:
    """Returns whole experts, or a slice of each if the ranks cannot have equally many."""
    if ranks.degree == 1 or cuts_by_expert(config, ranks.degree):
        held = ranks.share(experts.num_experts)
        return ExpertShare(held.start, len(held), 0, experts.intermediate_size)
    numbers = ranks.share(experts.intermediate_size)
    return ExpertShare(0, experts.num_experts, numbers.start, len(numbers))


def _twice(held: range, size: int) -> Ranges:
    """Returns the same rows of the gate and of the up projection."""
    return held, range(size + held.start, size + held.stop)
