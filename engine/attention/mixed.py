"""Attention of mixed steps: decode and prefill kernels write into one output."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tandem.engine.attention.base import GraphedAttention, GraphedHeadAttention, HeadAttention, PlannedAttention
from tandem.engine.attention.page_tables import new_positions
from tandem.engine.batch import Batch
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device


class _Part(NamedTuple):
    """
    Attributes:
        positions: (num_tokens,) on the device, not a slice of the forward pass's: Triton recompiles for unaligned
            addresses.
    """

    attention: PlannedAttention
    positions: torch.Tensor


class _MixedAttention(HeadAttention):
    def __init__(self, parts: Sequence[_Part], num_columns: int, beside: "torch.cuda.Stream | None" = None) -> None:
        """Args: beside: stream on which all parts but the first run; None: the current one."""
        self._parts = parts
        self._num_columns = num_columns
        self._beside = beside

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        out = qkv.new_empty(len(qkv), self._num_columns)
        lengths = [len(part.positions) for part in self._parts]
        works = [
            partial(part.attention.attend, piece, rotation.of(part.positions), qk_norm, layer, into)
            for part, piece, into in zip(self._parts, qkv.split(lengths), out.split(lengths), strict=True)
        ]
        if self._beside is None:
            for work in works:
                work()
            return out
        # Both kinds write and read pages of their own.
        current = torch.cuda.current_stream(qkv.device)
        self._beside.wait_stream(current)
        with torch.cuda.stream(self._beside):
            for work in works[1:]:
                work()
        works[0]()
        current.wait_stream(self._beside)
        return out


def plan_by_kind(
    batch: Batch,
    plan_decode: Callable[[Sequence[TokenSequence]], PlannedAttention],
    plan_prefill: Callable[[Sequence[TokenSequence]], PlannedAttention],
    num_columns: int,
    device: torch.device,
) -> HeadAttention:
    """Plans attention for a prefill, a decode step or a mixed step.

    Args:
        plan_decode, plan_prefill: each called at most once. Their results must not share memory that lasts from one
            layer to the next.
    """
    if batch.mode == "decode":
        return plan_decode(batch.decoded)
    if batch.mode == "prefill":
        return plan_prefill(batch.prompts)
    kinds = ((plan_decode, batch.decoded), (plan_prefill, batch.prompts))
    parts = [_Part(plan(sequences), to_device(new_positions(sequences), device)) for plan, sequences in kinds]
    return _MixedAttention(parts, num_columns)


def graphed_by_kind(
    decode: GraphedAttention,
    prefill: GraphedAttention,
    num_columns: int,
    beside: "torch.cuda.Stream | None" = None,
) -> HeadAttention:
    """Combines attention of one GraphableHeadBackend with computes_mixed, decode rows first.

    Args:
        beside: stream for the prefill's kernels, captured in the same graph. Both kinds' kernels must share no memory.
            None: one kind runs after the other.
    """
    assert isinstance(decode, GraphedHeadAttention) and isinstance(prefill, GraphedHeadAttention)
    return _MixedAttention([_Part(part, part.positions) for part in (decode, prefill)], num_columns, beside)
