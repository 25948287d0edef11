from abc import abstractmethod
from collections.abc import Sequence

import torch

from tandem.engine.attention.base import Attention
from tandem.engine.models.base import Weights


class DraftModel(Weights):
    """Layers that draft for a target model: a model of their own, or layers that read the target's states.

    The row of a token reads the token, and the target's state of the token before it. So its keys and values depend on
    no later token, as those of the target, and pages may be shared by the tokens up to their end.

    Attributes:
        num_q_heads: query heads of its layers.
        layers_read: layers of the target whose inputs make a state.
        reads_output: True if the output of the target's last layer makes a state.
        state_size: numbers of a state; 0: rows read tokens alone.
    """

    num_q_heads: int
    layers_read: Sequence[int] = ()
    reads_output: bool = False
    state_size: int = 0

    @property
    def is_capturable(self) -> bool:
        """As Model.is_capturable."""
        return True

    @abstractmethod
    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        attention: Attention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layers and writes their pages.

        Args:
            input_ids, positions: (num_tokens,) int64.
            states: (num_tokens, state_size) of the token before each; may be overwritten. None without states.
            attention: planned, of the drafter's pages.
            rows: as of Model.hidden_states.

        Returns:
            (num_rows, hidden_size).
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the next token's logits, (num_rows, vocab_size of the target). Args: hidden: of `run`; unchanged."""

    def states(self, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """Returns the states of all tokens of the target's forward pass, (num_tokens, state_size).

        Args:
            inputs: of layers_read, (num_tokens, hidden_size) each.
            output: of the last layer; of all tokens with reads_output.
        """
        raise NotImplementedError

    def next_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns states for rows behind drafts, whose target states are not known. Args: hidden: of `run`."""
        return hidden
