"""Drafts by a small model of the same vocabulary."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from tandem.engine.attention.base import Attention
from tandem.engine.draft_models.base import DraftModel
from tandem.engine.models.base import Model
from tandem.engine.models.part import Part


class WholeDraftModel(DraftModel):
    def __init__(self, model: Model) -> None:
        self.model = model
        self.config = model.config
        self.num_q_heads = model.config.num_q_heads

    @property
    def is_capturable(self) -> bool:
        return self.model.is_capturable

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.stacked_parameters()

    def parts(self) -> Mapping[str, Part]:
        return self.model.parts()

    def projections(self) -> Iterator[str]:
        return self.model.projections()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights)

    def loaded(self) -> None:
        self.model.loaded()

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model.hidden_states(input_ids, positions, attention, rows)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.model.logits(hidden, out)
