"""A model together with the layers that draft for it: every forward pass computes both."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.attention.base import Attention
from tandem.engine.draft_models.backend import DraftedAttention
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.base import Model
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.linears import HeldProjections
from tandem.engine.models.part import Part


class DraftedModel(Model):
    """The target model, whose forward passes also write the drafter's pages, for the same tokens.

    So the drafter's keys and values are wherever the target's are: behind a handover, a cached prefix or a stored page,
    and also after steps without drafts. Its parameters are the target's alone.

    Attributes:
        drafter: shares no weights with the target that loading would fill twice.
    """

    def __init__(self, target: DecoderModel, drafter: DraftModel) -> None:
        self.config = target.config
        self.dtype = target.dtype
        self.expert_counts = target.expert_counts
        self.target = target
        self.drafter = drafter
        self._layers_read = tuple(drafter.layers_read)
        if self.expert_counts is not None:
            # Rows that do not count have no experts.
            self.expert_counts.is_last_whole = drafter.reads_output

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.target.named_parameters()

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.target.stacked_parameters()

    def parts(self) -> Mapping[str, Part]:
        return self.target.parts()

    def projections(self) -> Iterator[str]:
        return self.target.projections()

    def adaptable(self) -> Iterator[HeldProjections]:
        return self.target.adaptable()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.target.load_weights(weights)

    def loaded(self) -> None:
        self.target.loaded()

    def shallow(self, ops: LayerOps | None = None) -> "DraftedModel":
        model = DraftedModel(self.target.shallow(ops), self.drafter)
        # It has few layers.
        model._layers_read = (0,) * len(self._layers_read)
        return model

    @property
    def is_capturable(self) -> bool:
        return self.target.is_capturable and self.drafter.is_capturable

    def counting(self, staged: torch.Tensor) -> AbstractContextManager[None]:
        return self.target.counting(staged)

    @torch.inference_mode()
    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
        adapters: AdapterBatch | None = None,
    ) -> torch.Tensor:
        assert isinstance(attention, DraftedAttention)
        drafter, layers = self.drafter, self._layers_read
        inputs: dict[int, torch.Tensor] = {}

        def observe(layer: int, x: torch.Tensor) -> None:
            if layer in layers:
                inputs[layer] = x.clone()

        # Only its own rows need the last layer's output, if the drafter does not read it.
        computed = None if drafter.reads_output else rows
        hidden = self.target.hidden_states(
            input_ids, positions, attention.target, computed, meanwhile, adapters, observe if layers else None
        )
        before: torch.Tensor | None = None
        if attention.states is not None:
            before = attention.states.exchange(drafter.states([inputs[layer] for layer in layers], hidden))
        if meanwhile is not None:
            meanwhile()
        drafter.run(input_ids, positions, before, attention.drafter, rows=input_ids.new_empty(0))
        return hidden.index_select(0, rows) if computed is None and rows is not None else hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.final_norm(hidden)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.target.logits(hidden, out)
