"""The lanes of a link: which KV heads each rank of the sender copies to each rank of the receiver."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.kvcache.base import PageLayout
from tandem.head_slice import HeadSlice


@dataclass(frozen=True, slots=True)
class PagePart:
    """Some heads' place in a page: equal pieces at equal distances, one for each token's keys or values in a layer.

    Attributes:
        offset: start of the first piece, in bytes.
        stride: distance between the starts of two pieces, in bytes.
        piece_bytes: length of a piece.
    """

    num_pieces: int
    offset: int
    stride: int
    piece_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_pieces * self.piece_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_pieces * self.stride

    @property
    def is_whole(self) -> bool:
        return self.piece_bytes == self.stride


@dataclass(frozen=True, slots=True)
class Lane:
    """Way of some heads from one rank's pages to another's.

    Attributes:
        heads: the carried heads.
        sender_heads, receiver_heads: all heads in a page of each rank.
    """

    sender_rank: int
    receiver_rank: int
    heads: HeadSlice
    sender_heads: HeadSlice
    receiver_heads: HeadSlice

    def sender_part(self, layout: PageLayout) -> PagePart:
        """Args: layout: of any rank of this model."""
        return _part(layout, self.sender_heads, self.heads)

    def receiver_part(self, layout: PageLayout) -> PagePart:
        return _part(layout, self.receiver_heads, self.heads)


def plan_lanes(senders: Sequence[HeadSlice], receivers: Sequence[HeadSlice]) -> tuple[Lane, ...]:
    """Plans a link that brings every head of every receiving rank from exactly one sending rank.

    Receiving ranks with equal heads are spread over the sending ranks that hold them.

    Args:
        senders, receivers: each rank's heads.

    Returns:
        At most one lane for each pair of ranks, in the order of the receiving ranks, then of the sending ranks.

    Raises:
        ValueError: the heads are not shared as by HeadSlice.of, or the models differ in heads.
    """
    total = _total(senders, "sender")
    if total != _total(receivers, "receiver"):
        raise ValueError(f"KV heads differ: {total} at the sender, {receivers[0].total} at the receiver")
    lanes = []
    # Ranks that hold one head.
    num_holders, num_takers = max(1, len(senders) // total), max(1, len(receivers) // total)
    for receiver_rank, receiver in enumerate(receivers):
        holder = receiver_rank % num_takers * num_holders // num_takers
        for sender_rank, sender in enumerate(senders):
            first, end = max(sender.first, receiver.first), min(sender.end, receiver.end)
            if first < end and sender_rank % num_holders == holder:
                lanes.append(Lane(sender_rank, receiver_rank, HeadSlice(first, end - first, total), sender, receiver))
    return tuple(lanes)


def _total(ranks: Sequence[HeadSlice], name: str) -> int:
    """Returns the model's heads. Raises ValueError if a rank holds others than by HeadSlice.of."""
    if not ranks:
        raise ValueError(f"the {name} has no ranks")
    total = ranks[0].total
    for rank, heads in enumerate(ranks):
        if heads != (expected := HeadSlice.of(total, rank, len(ranks))):
            raise ValueError(f"rank {rank} of {len(ranks)} of the {name} holds {heads}, not {expected}")
    return total


def _part(layout: PageLayout, page: HeadSlice, heads: HeadSlice) -> PagePart:
    head_bytes = layout.head_bytes
    num_pieces = layout.page_bytes // (layout.heads.num * head_bytes)
    offset = (heads.first - page.first) * head_bytes
    return PagePart(num_pieces, offset, page.num * head_bytes, heads.num * head_bytes)
