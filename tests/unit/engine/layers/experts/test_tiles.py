"""Tiles of grouped experts: resource limits, and the number of compiled kernels."""

import pytest

from tandem.engine.layers.experts.tiles import RESERVED, TILES, Kind, Shape, num_bytes, rows_for, tiles_for
from tandem.engine.models.quantization import BLOCK

H100 = 227 * 1024
L4 = 99 * 1024
KINDS: tuple[Kind, ...] = ("plain", "channel", "block")
# Experts of a layer and of a token, hidden size, intermediate size.
SIZES = {
    "30B": (128, 8, 2048, 768),
    "8x7B": (8, 2, 4096, 14336),
    "7B": (64, 8, 2048, 1024),
    "14B": (60, 4, 2048, 1408),
    "tiny": (4, 2, 128, 128),
    "huge": (512, 16, 7168, 2048),
}


def shape(kind: Kind, name: str) -> Shape:
    num_experts, _, hidden_size, size = SIZES[name]
    return Shape(kind, num_experts, hidden_size, size)


@pytest.mark.parametrize("shared_memory", [H100, L4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_tiles_fit_the_device(kind: Kind, name: str, shared_memory: int) -> None:
    k = SIZES[name][1]
    for num_tokens in (1, 9, 16, 17, 64, 100, 256, 512, 1024):
        tiles = tiles_for(num_tokens * k, shape(kind, name), shared_memory)
        for tile, num_factors in ((tiles.gate_up, 2), (tiles.down, 1)):
            assert num_bytes(tile, num_factors, tiles.rows, kind) <= shared_memory - RESERVED
            assert tile.num_stages >= 2
            # The instruction multiplies 64 rows of weights, and a thread's sums stay in registers.
            assert tile.outputs % 64 == 0
            assert num_factors * tile.outputs * tiles.rows <= 128 * 32 * tile.num_warps
            # A step has one scale of weights.
            assert kind != "block" or (tile.depth == BLOCK and BLOCK % tile.outputs == 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_few_variants_are_compiled(kind: Kind, name: str) -> None:
    k = SIZES[name][1]
    chosen = [tiles_for(num_tokens * k, shape(kind, name), H100) for num_tokens in range(1, 1025)]
    assert len({(t.rows, t.gate_up) for t in chosen} | {(t.rows, t.down) for t in chosen}) <= 2 * len(TILES[kind]) <= 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_holds_an_experts_average(kind: Kind) -> None:
    largest = max(TILES[kind])
    for rows_of_expert in range(1, 300):
        rows = rows_for(rows_of_expert, kind)
        assert rows == largest or rows >= rows_of_expert
        # No smaller tile would hold them.
        assert all(other < rows_of_expert for other in TILES[kind] if other < rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_more_tokens_never_have_smaller_tiles(kind: Kind, name: str) -> None:
    k = SIZES[name][1]
    rows = [tiles_for(k * num_tokens, shape(kind, name), H100).rows for num_tokens in range(1, 2000)]
    assert rows == sorted(rows) and rows[0] == min(TILES[kind])
