"""Drafts by the layer behind a model's last, which was trained with the model to predict one token more."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from tandem.engine.attention.base import Attention
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.rotary import Rotation
from tandem.engine.models.decoder import DecoderLayer, DecoderModel
from tandem.engine.models.filling import fill
from tandem.engine.models.linears import Linears
from tandem.engine.models.part import Part

# The target's own are used. Checkpoints have copies of them.
_SHARED = ("embed_tokens.", "shared_head.head.")


class MtpModel(DraftModel):
    """The module of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2), at model.layers.N behind N layers.

    A state is the target's output behind its final norm. Further drafts take the layer's own output for it.
    """

    reads_output = True

    def __init__(self, target: DecoderModel, device: torch.device, ops: LayerOps) -> None:
        config, dtype = target.config, target.dtype
        self.config = config
        self.num_q_heads = config.num_q_heads
        self.state_size = config.hidden_size
        self._target = target
        self._ops = ops
        self._name = f"model.layers.{config.extra_layers[0]}."

        def norm() -> Norm:
            return Norm(torch.empty(config.hidden_size, dtype=dtype, device=device), config.rms_norm_eps)

        self._token_norm, self._state_norm, self._output_norm = norm(), norm(), norm()
        self._joined = Linear([config.hidden_size], 2 * config.hidden_size, False, dtype, device)
        self._layer = DecoderLayer(Linears(config, config.extra_layers[0], dtype, device), None)

    @property
    def is_capturable(self) -> bool:
        return self._layer.mlp.is_capturable(self._ops)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._around_layer()
        yield from ((f"{self._name}{name}", weight) for name, weight in self._layer.named_parameters())

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._around_layer()
        yield from ((f"{self._name}{name}", weight) for name, weight in self._layer.stacked_parameters())

    def _around_layer(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{self._name}enorm.weight", self._token_norm.weight
        yield f"{self._name}hnorm.weight", self._state_norm.weight
        yield f"{self._name}eh_proj.weight", self._joined.weight
        yield f"{self._name}shared_head.norm.weight", self._output_norm.weight

    def parts(self) -> Mapping[str, Part]:
        return {f"{self._name}{name}": part for name, part in self._layer.parts.items()}

    def projections(self) -> Iterator[str]:
        layer = self._layer
        yield from (f"{self._name}{name}" for name in (*layer.attention.projections(), *layer.mlp.projections()))

    def own_name(self, name: str) -> str | None:
        is_own = name.startswith(self._name) and not name[len(self._name) :].startswith(_SHARED)
        return name if is_own else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        fill(self, weights, lambda name, tensor: self._layer.mlp.held_part(name[len(self._name) :], tensor))
        self.loaded()

    @torch.inference_mode()
    def loaded(self) -> None:
        self._layer.loaded()

    @torch.inference_mode()
    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert states is not None
        ops = self._ops
        tokens = ops.normed(self._target.embedded(input_ids), self._token_norm)
        x = ops.linear(torch.cat((tokens, ops.normed(states, self._state_norm)), dim=-1), self._joined)
        rotation = Rotation(self._target.rotary, positions, x.dtype)
        attended = self._layer.attend(x, rotation, attention, 0, ops)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        return self._layer.forward(x, attended, ops) if len(x) else x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._target.logits_behind(hidden, self._output_norm, out)

    def states(self, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return self._target.final_norm(output)
