from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from tandem.engine.attention.base import Attention
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.rotary import Rotation


class SelfAttention(ABC):
    """The part of a layer before its MLP: projections around the attention over pages."""

    @abstractmethod
    def attend(
        self, x: torch.Tensor, norm: Norm, rotation: Rotation, attention: Attention, layer: int, ops: LayerOps
    ) -> torch.Tensor:
        """Attends with the projections of rms_norm(x), and writes the pages of all tokens.

        Args:
            x: the layer's input, (num_tokens, hidden_size).
            attention: planned, of the model's page layout.
            layer: the layer's index in the pages.

        Returns:
            (num_tokens, size), inputs of `project`.
        """

    @abstractmethod
    def project(self, attended: torch.Tensor, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """Returns x + the output projection of any rows of attended, (num_rows, hidden_size). Args: x: may be
        overwritten."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all parameters as a checkpoint has them, by name below model.layers.N."""

    @abstractmethod
    def projections(self) -> Iterator[str]:
        """Yields all modules that FP8 applies to, on any device, by name below model.layers.N."""

    @abstractmethod
    def loaded(self) -> None:
        """Call once after all parameters are loaded."""

    @property
    @abstractmethod
    def kind(self) -> tuple[type, ...]:
        """Equal if two layers run the same kernels."""
