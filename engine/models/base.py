"""What the engine asks of a model."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch

from tandem.engine.attention.base import Attention
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.config import ModelConfig


class Model(ABC):
    """A causal language model's weights and forward pass on one device. An architecture names the class that computes
    it (engine/models/architectures.py).

    Attributes:
        config: its shape.
        dtype: of weights and activations.
    """

    config: ModelConfig
    dtype: torch.dtype

    @abstractmethod
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: LayerOps) -> None:
        """Allocates weights without values. Args: ops: what layers compute with on this device."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that load_weights fills, by its name in a checkpoint and in the shape that it has there."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes over the tensors of a checkpoint, by their names there.

        Raises:
            ValueError: a tensor is missing, unexpected or of the wrong shape; the message names it.
        """

    def shallow(self) -> "Model":
        """A model of the same weights that computes few layers but runs all of its kernels, for who wants to have them
        loaded; one that cannot is as deep as ever."""
        return self

    @abstractmethod
    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the last layer gives.

        Args:
            input_ids, positions: (num_tokens,) int64.
            attention: planned for the same batch.
            rows: (num_rows,) int64, of the token dimension, those that are wanted, in any order and as often as they
                are named: of the others the last layer needs to give no more than keys and values. None: all.

        Returns:
            (num_rows, hidden_size) of the model's dtype.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            hidden: (num_rows, hidden_size), of the tokens whose successors are wanted; left as it is.
            out: (num_rows, vocab_size) of the model's dtype, where the logits are to go; None: new memory.

        Returns:
            (num_rows, vocab_size) of the model's dtype.
        """

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        logits_rows: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Both in one: logits for the tokens whose successors are wanted.

        Args:
            logits_rows: (num_rows,) int64, rows of the token dimension; None: all.
            input_ids, positions, attention, out: as above.
        """
        return self.logits(self.hidden_states(input_ids, positions, attention, logits_rows), out)
