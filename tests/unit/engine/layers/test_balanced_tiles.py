"""Tiles of evenly dealt products: every step of every tile is computed once, and sums are joined in order."""

import random
from collections.abc import Iterator

import pytest

from tandem.engine.layers.balanced_tiles import (
    COARSE_MULTIPLE,
    FEW_TOKENS,
    MAX_GROUP_TOKENS,
    MIN_STAGES,
    BalancedTile,
    Deal,
    deal,
    has_room,
    num_stages,
    result_bytes,
    tile_of,
    token_multiple,
)

NUM_MULTIPROCESSORS, SHARED_MEMORY = 132, 232_448
SHAPES = [(outputs, cluster) for outputs in (128, 64) for cluster in (1, 2, 4)]


def stretches(dealt: Deal, unit: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields each cluster's (cluster, tile, first unit, end unit), as balanced_products.cu walks through them."""
    num_units = -(-dealt.num_steps // unit)
    for cluster in range(dealt.num_clusters):
        at, end = (dealt.num_cut * num_units * c // dealt.num_clusters for c in (cluster, cluster + 1))
        while at < end:
            tile, first = divmod(at, num_units)
            size = min(num_units - first, end - at)
            yield cluster, tile, first, first + size
            at += size
        for tile in range(dealt.num_cut + cluster, dealt.num_tiles, dealt.num_clusters):
            yield cluster, tile, 0, num_units


@pytest.mark.parametrize(("outputs", "cluster"), SHAPES)
def test_every_step_is_dealt_once_and_evenly(outputs: int, cluster: int) -> None:
    rng = random.Random(0)
    for _ in range(100):
        num_tokens, unit = rng.randint(1, 1024), rng.choice((1, 2, 4, 8))
        tile = tile_of(num_tokens, outputs, cluster, -(-num_tokens // MAX_GROUP_TOKENS), unit)
        if tile is None:
            continue
        num_rows, in_size = rng.choice((256, 1000, 4096, 28672)), rng.choice((512, 1136, 4096, 14336))
        dealt = deal(tile, num_tokens, num_rows, 2 * in_size, NUM_MULTIPROCESSORS // cluster)
        num_units = -(-dealt.num_steps // unit)
        owners: dict[tuple[int, int], int] = {}
        counts = [0] * dealt.num_clusters
        begun_within: list[int] = []
        for number, index, first, end in stretches(dealt, unit):
            counts[number] += end - first
            begun_within += [number] if first else []
            for step in range(first, end):
                assert owners.setdefault((index, step), number) == number
        assert len(owners) == dealt.num_tiles * num_units
        assert max(counts) - min(counts) <= 1
        # Each has room for the partial sums of one tile.
        assert len(begun_within) == len(set(begun_within))
        # Sums are joined in the order of the steps.
        assert all(owners[index, step] <= owners[index, step + 1] for index, step in owners if step + 1 < num_units)


@pytest.mark.parametrize(("outputs", "cluster"), SHAPES)
def test_tiles_are_equal_and_fit_shared_memory(outputs: int, cluster: int) -> None:
    multiple = token_multiple(outputs, cluster)
    for num_tokens in range(1, 1025):
        number = -(-num_tokens // MAX_GROUP_TOKENS)
        tile = tile_of(num_tokens, outputs, cluster, number, 4)
        assert tile is not None
        assert tile.tokens % multiple == 0
        largest = multiple if tile.tokens <= FEW_TOKENS else COARSE_MULTIPLE
        assert num_tokens <= tile.tokens * number < num_tokens + number * largest
        assert all(num_stages(tile, SHARED_MEMORY, is_gated=is_gated) >= MIN_STAGES for is_gated in (False, True))
    assert tile_of(2 * MAX_GROUP_TOKENS + 1, outputs, cluster, 2, 4) is None


@pytest.mark.parametrize(("outputs", "parts"), [(128, 4), (128, 8), (192, 2)])
def test_blocks_of_a_cluster_share_the_steps_of_one_tile(outputs: int, parts: int) -> None:
    for num_tokens in (1, 16, 33, 144, 256, 300):
        tile = tile_of(num_tokens, outputs, 1, -(-num_tokens // 256), 1, parts)
        assert tile is not None and tile.num_blocks == parts
        dealt = deal(tile, num_tokens, 4096, 8192, NUM_MULTIPROCESSORS // parts)
        num_tiles = -(-4096 // outputs) * -(-num_tokens // tile.tokens)
        assert (dealt.num_clusters, dealt.num_tiles, dealt.num_cut) == (num_tiles, num_tiles, 0)
        # Each finishes at most so many rows of 16 tokens.
        whole = result_bytes(tile._replace(parts=1), is_gated=False)
        assert result_bytes(tile, is_gated=False) * parts >= whole
        # Two warp groups or more multiply, one fetches.
        assert tile.num_threads == 128 * (1 + outputs // 64)


def test_sums_take_the_place_of_stages() -> None:
    wide = BalancedTile(192, 192, 1, 1, 4)
    assert has_room(wide, SHARED_MEMORY, is_gated=False)
    # Three stages have 172,032 bytes, sums 196,608.
    assert not has_room(wide._replace(tokens=256), SHARED_MEMORY, is_gated=False)


def test_a_large_matrix_is_dealt_in_whole_waves_and_a_cut_rest() -> None:
    dealt = deal(BalancedTile(128, 256, 2, 4), 512, 28672, 8192, 66)
    # 112 pairs of output tiles, twice: three waves and 26 tiles; the last wave is cut with the rest.
    assert (dealt.num_tiles, dealt.num_cut, dealt.num_clusters) == (224, 26 + 66, 66)
    assert deal(BalancedTile(128, 256, 2, 4), 512, 66 * 256, 8192, 66).num_cut == 0
