"""Forwards that decode and compute prompts: attention of each kind of tokens by kernels of its own, into one output."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tandem.engine.attention.base import Attention, GraphedAttention, PlannedAttention
from tandem.engine.attention.page_tables import new_positions
from tandem.engine.batch import Batch
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device


class _Part(NamedTuple):
    """Some of a forward's tokens, side by side.

    Attributes:
        positions: (num_tokens,) on the device. They have memory of their own and are no piece of the forward's, for
            kernels are compiled anew for memory that begins elsewhere than at a multiple of 16.
    """

    attention: PlannedAttention
    positions: torch.Tensor


class _MixedAttention(Attention):
    """Part after part, each into its rows of one output."""

    def __init__(self, parts: Sequence[_Part], num_columns: int) -> None:
        """Args: num_columns: of the output."""
        self._parts = parts
        self._num_columns = num_columns

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        out = qkv.new_empty(len(qkv), self._num_columns)
        lengths = [len(part.positions) for part in self._parts]
        for part, piece, into in zip(self._parts, qkv.split(lengths), out.split(lengths), strict=True):
            part.attention.attend(piece, rotation.of(part.positions), qk_norm, layer, into)
        return out


def plan_by_kind(
    batch: Batch,
    plan_decode: Callable[[Sequence[TokenSequence]], PlannedAttention],
    plan_prefill: Callable[[Sequence[TokenSequence]], PlannedAttention],
    num_columns: int,
    device: torch.device,
) -> Attention:
    """The attention of one forward, of one kind of sequences or of both.

    Args:
        plan_decode, plan_prefill: each called once at most. What they plan for must not share memory that lasts from
            one layer to the next.
        num_columns: num_q_heads * head_dim.
    """
    if batch.mode == "decode":
        return plan_decode(batch.decoded)
    if batch.mode == "prefill":
        return plan_prefill(batch.prompts)
    kinds = ((plan_decode, batch.decoded), (plan_prefill, batch.prompts))
    parts = [_Part(plan(sequences), to_device(new_positions(sequences), device)) for plan, sequences in kinds]
    return _MixedAttention(parts, num_columns)


def graphed_by_kind(decode: GraphedAttention, prefill: GraphedAttention, num_columns: int) -> Attention:
    """The attention of forwards of both kinds and of fixed sizes, whose decoded sequences come first; each is planned
    by itself.

    Args:
        decode, prefill: of one GraphableBackend that computes_mixed.
        num_columns: num_q_heads * head_dim.
    """
    return _MixedAttention([_Part(part, part.positions) for part in (decode, prefill)], num_columns)
