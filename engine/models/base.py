import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.attention.base import Attention
from tandem.engine.collectives.base import Collectives
from tandem.engine.layers.experts.counts import ExpertCounts
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.linears import HeldProjections
from tandem.engine.models.part import NO_PARTS, Part

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


class Weights(ABC):
    """What a checkpoint fills: a model, or layers that draft for one.

    Attributes:
        config: of the whole model, also on a rank that holds a part of it.
    """

    config: ModelConfig

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor that load_weights fills, with its name in a checkpoint; `parts` says where a tensor lies
        in the checkpoint's."""

    def stacked_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the same memory as named_parameters, with thousands of small tensors joined into few."""
        return self.named_parameters()

    def parts(self) -> Mapping[str, Part]:
        """Returns the parts of tensors that this rank holds, by name, of named_parameters and of stacked_parameters.

        Whole tensors are not in it, and neither are those of single experts.
        """
        return NO_PARTS

    def projections(self) -> Iterator[str]:
        """Yields the names of all modules that FP8 applies to, like model.layers.0.mlp.up_proj."""
        return iter(())

    def own_name(self, name: str) -> str | None:
        """Returns a checkpoint's tensor's name here; None if nothing here holds it."""
        match = _LAYER.match(name)
        return name if match is None or int(match[1]) not in self.config.extra_layers else None

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the tensors of a checkpoint.

        Raises:
            ValueError: a tensor is missing, unexpected or of the wrong shape; the message names it.
        """

    @abstractmethod
    def loaded(self) -> None:
        """Ends loading. load_weights calls it; call it after filling stacked_parameters directly."""


class Model(Weights):
    """A causal language model on one device.

    Attributes:
        expert_counts: None without mixtures of experts.
        collectives: of the worker's ranks; None on the only one.
    """

    dtype: torch.dtype
    expert_counts: ExpertCounts | None = None
    collectives: Collectives | None = None

    @property
    def samples(self) -> bool:
        """True if `logits` returns all columns: on the leader of the ranks."""
        return self.collectives is None or self.collectives.ranks.is_leader

    @abstractmethod
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps,
        collectives: Collectives | None = None,
    ) -> None:
        """Allocates uninitialized weights. Args: collectives: of the ranks that share the model; None: it is whole."""

    def adaptable(self) -> Iterator[HeldProjections]:
        """Yields the matrices that adapters may change, in the order of layers. Only linears of `adapted_modules`."""
        return iter(())

    def shallow(self, ops: LayerOps | None = None) -> "Model":
        """Returns a model of the same weights with few layers but all kernels, or the whole model. Args: ops: its
        operations, of decoders alone; None: the same."""
        return self

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs can capture forward passes, because they never wait for the device."""
        return True

    def counting(self, staged: torch.Tensor) -> AbstractContextManager[None]:
        """ExpertCounts.only, without effect on a model without experts."""
        return nullcontext() if self.expert_counts is None else self.expert_counts.only(staged)

    @abstractmethod
    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
        adapters: AdapterBatch | None = None,
    ) -> torch.Tensor:
        """Computes the last layer's output.

        Args:
            input_ids, positions: (num_tokens,) int64.
            rows: (num_rows,) int64, rows to return, in any order, with repeats. For others the last layer computes only
                keys and values. None: all rows.
            meanwhile: called before each layer; launching one takes the host a quarter of a millisecond.
            adapters: None: no row has one.

        Returns:
            (num_rows, hidden_size) of the model's dtype.
        """

    @abstractmethod
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalizes the last layer's output as `logits` does before its projection."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes next-token logits, (num_rows, vocab_size) of the model's dtype.

        A follower returns this rank's columns alone, because the leader samples.

        Args:
            hidden: (num_rows, hidden_size), not modified.
        """

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        logits_rows: torch.Tensor | None,
        out: torch.Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
        adapters: AdapterBatch | None = None,
    ) -> torch.Tensor:
        """Args: logits_rows: as `rows` of hidden_states; meanwhile, adapters: as there."""
        return self.logits(self.hidden_states(input_ids, positions, attention, logits_rows, meanwhile, adapters), out)
