from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps


class Mlp(ABC):
    """The part of a layer after attention."""

    @abstractmethod
    def forward(self, x: torch.Tensor, norm: Norm, ops: LayerOps) -> torch.Tensor:
        """Returns x + the MLP of rms_norm(x), (num_tokens, hidden_size). Args: x: may be overwritten."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all parameters as a checkpoint has them, by name below model.layers.N."""

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the same memory in few tensors."""
        return self.named_parameters()

    @abstractmethod
    def projections(self) -> Iterator[str]:
        """Yields all modules that FP8 applies to, on any device, by name below model.layers.N."""

    def held_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the part of a checkpoint's tensor that this device holds, None if it holds nothing of it.

        Args:
            name: below model.layers.N.

        Raises:
            ValueError: the tensor has another shape than the configuration says.
        """
        return tensor

    @abstractmethod
    def loaded(self) -> None:
        """Call once after all parameters are loaded."""

    def is_capturable(self, ops: LayerOps) -> bool:
        """Returns whether a CUDA graph can capture `forward`."""
        return True

    @property
    @abstractmethod
    def kind(self) -> tuple[type, ...]:
        """Equal if two MLPs run the same kernels."""
