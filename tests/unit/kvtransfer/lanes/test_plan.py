"""Plans of lanes: every head of every receiving rank arrives once, at its place, whatever the two degrees."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.page_part import PagePart
from tandem.head_slice import HeadSlice
from tandem.kvtransfer.lanes.plan import plan_lanes

DEGREES = range(1, 9)


def layout_of(num_heads: int) -> PageLayout:
    """Pages of `num_heads` KV heads; 0: of latents."""
    if not num_heads:
        return LatentLayout(num_layers=2, page_size=3, kv_rank=4, rope_dim=2, dtype="bfloat16")
    return KvHeadLayout(num_layers=2, page_size=3, num_kv_heads=num_heads, head_dim=4, dtype="bfloat16")


def ranks_of(layout: PageLayout, degree: int) -> list[PageLayout]:
    return [layout.shard(rank, degree) for rank in range(degree)]


def can_share(num_heads: int, degree: int) -> bool:
    return not num_heads or num_heads % degree == 0 or degree % num_heads == 0


CASES = [
    case
    for case in product((0, 1, 2, 4, 8), DEGREES, DEGREES)
    if all(can_share(case[0], degree) for degree in case[1:])
]


def page_of(layout: PageLayout) -> np.ndarray:
    """A page whose numbers of two bytes name their layer, keys or values, token, KV head and dimension."""
    whole = np.arange(layout.whole.page_bytes // 2, dtype=np.uint16)
    heads = layout.heads
    by_head = whole.reshape(-1, heads.total, layout.head_bytes // 2)
    return np.ascontiguousarray(by_head[:, heads.first : heads.end]).view(np.uint8).reshape(-1)


def place(part: PagePart, page: np.ndarray) -> np.ndarray:
    return part.view(page[None])[0]


@pytest.mark.parametrize("num_heads", [0, 1, 2, 4, 8])
def test_every_byte_arrives_once_at_its_place(num_heads: int) -> None:
    layout = layout_of(num_heads)
    for _, num_senders, num_receivers in (case for case in CASES if case[0] == num_heads):
        senders, receivers = ranks_of(layout, num_senders), ranks_of(layout, num_receivers)
        sent = [page_of(rank) for rank in senders]
        arrived = [np.zeros(rank.page_bytes, np.uint8) for rank in receivers]
        times = [np.zeros(rank.page_bytes, np.uint8) for rank in receivers]
        for lane in plan_lanes([rank.heads for rank in senders], [rank.heads for rank in receivers]):
            # Both ends compute the same parts, each from its own layout.
            source, destination = lane.source(layout), lane.destination(layout)
            assert source == lane.source(senders[lane.sender_rank])
            assert destination == lane.destination(receivers[lane.receiver_rank])
            assert source.page_bytes == len(sent[lane.sender_rank]) and source.num_bytes == destination.num_bytes
            place(destination, arrived[lane.receiver_rank])[:] = place(source, sent[lane.sender_rank])
            place(destination, times[lane.receiver_rank])[:] += 1
        assert all((count == 1).all() for count in times), (num_senders, num_receivers)
        expected = [page_of(rank) for rank in receivers]
        assert all(map(np.array_equal, arrived, expected)), (num_senders, num_receivers)


@pytest.mark.parametrize("num_heads", [0, 1, 2, 4, 8])
def test_load_is_even_over_the_holders_of_a_head(num_heads: int) -> None:
    layout = layout_of(num_heads)
    for _, num_senders, num_receivers in (case for case in CASES if case[0] == num_heads):
        senders = [rank.heads for rank in ranks_of(layout, num_senders)]
        lanes = plan_lanes(senders, [rank.heads for rank in ranks_of(layout, num_receivers)])
        pairs = [(lane.sender_rank, lane.receiver_rank) for lane in lanes]
        assert len(set(pairs)) == len(pairs) and pairs == sorted(pairs, key=lambda pair: pair[::-1])
        carried = Counter[int]()
        for lane in lanes:
            carried[lane.sender_rank] += lane.heads.num
        loads_of_holders: dict[HeadSlice, list[int]] = {}
        for rank, heads in enumerate(senders):
            loads_of_holders.setdefault(heads, []).append(carried[rank])
        assert all(max(loads) - min(loads) <= 1 for loads in loads_of_holders.values()), (num_senders, num_receivers)


@pytest.mark.parametrize("num_heads", [0, 1, 2, 4, 8])
def test_ranks_of_equal_degrees_copy_whole_pages_each_to_its_like(num_heads: int) -> None:
    layout = layout_of(num_heads)
    for degree in (degree for degree in DEGREES if can_share(num_heads, degree)):
        heads = [rank.heads for rank in ranks_of(layout, degree)]
        lanes = plan_lanes(heads, heads)
        assert [(lane.sender_rank, lane.receiver_rank) for lane in lanes] == [(r, r) for r in range(degree)]
        assert all(lane.source(layout).is_whole and lane.destination(layout).is_whole for lane in lanes)


def test_latents_come_whole_from_one_rank() -> None:
    lanes = plan_lanes([HeadSlice(0, 1, 1)] * 4, [HeadSlice(0, 1, 1)] * 2)
    assert [(lane.sender_rank, lane.receiver_rank) for lane in lanes] == [(0, 0), (2, 1)]
    assert all(lane.destination(layout_of(0)).is_whole for lane in lanes)


def test_a_page_of_another_number_of_tokens_has_other_pieces() -> None:
    layout = replace(KvHeadLayout(2, 16, 4, 8, "float32"), quantized_to="float8_e4m3fn")
    (lane, _) = plan_lanes([layout.heads], [layout.shard(rank, 2).heads for rank in range(2)])
    assert lane.source(layout) == PagePart(num_pieces=2 * 2 * 16, offset=0, stride=32, piece_bytes=16)
    assert lane.destination(layout) == PagePart(num_pieces=2 * 2 * 16, offset=0, stride=16, piece_bytes=16)


ALL = HeadSlice(0, 4, 4)
HALVES = [HeadSlice(0, 2, 4), HeadSlice(2, 2, 4)]


@pytest.mark.parametrize(
    ("senders", "receivers", "message"),
    [
        ([ALL], [HeadSlice(0, 8, 8)], "KV heads differ: 4 at the sender, 8 at the receiver"),
        ([], [ALL], "the sender has no ranks"),
        ([ALL], HALVES[::-1], "rank 0 of 2 of the receiver holds KV heads 2 to 3 of 4, not KV heads 0 to 1 of 4"),
        (HALVES[:1], [ALL], "rank 0 of 1 of the sender holds KV heads 0 to 1 of 4, not KV heads 0 to 3 of 4"),
        ([ALL, ALL, ALL], [ALL], "3 ranks cannot share 4 KV heads: use a degree that divides 4 or is a multiple of it"),
        ([HeadSlice(0, 0, 0)], [ALL], "1 ranks cannot share 0 KV heads"),
    ],
)
def test_other_ways_to_share_heads_are_refused(
    senders: list[HeadSlice], receivers: list[HeadSlice], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_lanes(senders, receivers)
