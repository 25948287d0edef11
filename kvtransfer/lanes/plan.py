"""The lanes of a link: which KV heads each rank of the sender copies to each rank of the receiver."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.page_part import PagePart
from tandem.head_slice import HeadSlice


@dataclass(frozen=True, slots=True)
class Lane:
    """Path of consecutive KV heads from one rank's pages to another rank's.

    Attributes:
        heads: the carried heads.
        sender_heads, receiver_heads: all heads in a page of each rank.
    """

    sender_rank: int
    receiver_rank: int
    heads: HeadSlice
    sender_heads: HeadSlice
    receiver_heads: HeadSlice

    def source(self, layout: PageLayout) -> PagePart:
        """Returns the heads' place in the sending rank's pages. Args: layout: of any rank of the model."""
        return PagePart.of(layout, self.sender_heads, self.heads)

    def destination(self, layout: PageLayout) -> PagePart:
        """Returns the heads' place in the receiving rank's pages."""
        return PagePart.of(layout, self.receiver_heads, self.heads)


def lane_parts(layout: PageLayout, lane: Lane | None) -> tuple[PagePart, PagePart]:
    """Returns the place of a lane's heads in the sending and in the receiving rank's pages. None: of all bytes."""
    if lane is None or lane.heads == lane.sender_heads == lane.receiver_heads:
        return PagePart.whole(layout.page_bytes), PagePart.whole(layout.page_bytes)
    return lane.source(layout), lane.destination(layout)


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
