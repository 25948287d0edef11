"""Candidates of the tuner of balanced products, and its table."""

import json

from benchmarks.kernels.balanced_table import (
    SHARED_MEMORY,
    Figure,
    MatrixSizes,
    candidates_for,
    choices_of,
    kernels_for,
    matrices_of,
    table_of,
    tiles_for,
)
from tandem.engine.layers.balanced_choice import Choice
from tandem.engine.layers.balanced_tiles import MAX_GROUP_TOKENS, MIN_STAGES, BalancedTile, num_stages
from tests.fakes.model_shapes import LLAMA_8B

DOWN = MatrixSizes("down", "plain", False, 4096, 14336, True)
FEW = Choice(16, 0)
FAST, SLOW = BalancedTile(128, 64, 2, 4), BalancedTile(128, 64, 1, 4)


def figure(num_tokens: int, library: float, tiles: dict[BalancedTile, float]) -> Figure:
    return Figure(DOWN, num_tokens, 30.0, {"library": library, "triton": 99.0}, tiles)


def test_candidates_hold_all_tokens_and_fit_shared_memory() -> None:
    for matrix in matrices_of(LLAMA_8B, 1, ("plain", "channel")):
        for num_tokens in (24, 64, 200, 300, 1024):
            tiles = list(tiles_for(matrix, num_tokens))
            assert len(set(tiles)) == len(tiles) > 0
            for tile in tiles:
                assert tile.tokens <= MAX_GROUP_TOKENS
                assert num_stages(tile, SHARED_MEMORY, is_gated=matrix.is_gated) >= MIN_STAGES


def test_tiles_with_parts_take_one_wave() -> None:
    # 32 tiles of 128 outputs, 22 of 192, twice if the tokens are in two tiles.
    parts = {
        num_tokens: {(*tile[:2], tile.parts) for tile in tiles_for(DOWN, num_tokens) if tile.parts > 1}
        for num_tokens in (96, 192)
    }
    assert parts[96] == {(128, 96, parts) for parts in (2, 3, 4)} | {(192, 96, parts) for parts in (3, 4, 5)}
    assert parts[192] >= {(128, 192, 4), (192, 192, 5), (128, 96, 2), (192, 96, 3)}
    assert not parts[192] & {(128, 192, 5), (128, 96, 3), (192, 96, 4)}


def test_ranks_share_a_models_matrices() -> None:
    whole, half = (list(matrices_of(LLAMA_8B, tp, ("plain",))) for tp in (1, 2))
    assert [(m.out_size, m.in_size) for m in whole[:4]] == [(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336)]
    assert [(m.out_size, m.in_size) for m in half[:4]] == [(3072, 4096), (4096, 2048), (7168, 4096), (4096, 7168)]


def test_the_table_has_the_fastest_tile_unless_another_kernel_is_as_fast() -> None:
    figures = [
        figure(64, 40.0, {FAST: 31.0, SLOW: 33.0}),
        figure(32, 40.0, {FAST: 32.0, SLOW: 30.0}),
        figure(128, 40.0, {FAST._replace(tokens=128): 39.5}),
        figure(48, 40.0, {FAST: 31.0}),
        figure(256, 40.0, {}),
    ]
    expected = [FEW, Choice(32, 1, 128, 1, 4), Choice(64, 1, 128, 2, 4), Choice(256, 0)]
    assert choices_of(figures) == expected
    assert json.loads(table_of(figures)) == [[["plain", False, 4096, 14336], [list(choice) for choice in expected]]]


def test_kernels_that_add_little_are_not_compiled() -> None:
    figures = [figure(64, 40.0, {FAST: 31.0, SLOW: 30.0}), figure(32, 40.0, {FAST: 35.0, SLOW: 36.0})]
    assert kernels_for(figures) == {SLOW._replace(unit=0)}
    assert choices_of(figures) == [FEW, Choice(64, 1, 128, 1, 4)]


def test_the_table_has_parts() -> None:
    tile = BalancedTile(192, 160, 1, 1, 4)
    _, choice = choices_of([figure(144, 40.0, {SLOW: 32.0, tile: 30.0})])
    assert choice == Choice(144, 1, 192, 1, 1, 4)


def test_fewer_tokens_in_the_same_tiles_time_only_the_fastest() -> None:
    tiles = candidates_for(DOWN, 160, None)
    assert len(tiles) > 3
    whole = figure(160, 40.0, {tile: 30.0 + index for index, tile in enumerate(tiles)})
    assert candidates_for(DOWN, 136, whole) == tiles[:3]
    assert len(candidates_for(DOWN, 128, whole)) > 3
