"""Product tiles: resource limits, and the number of compiled kernels."""

import pytest

from tandem.engine.layers.product_tiles import (
    MAX_SPLIT_TILE,
    MAX_TOKENS_GATED,
    Device,
    Kind,
    Product,
    Tile,
    divides,
    gated_tile_for,
    max_stages,
    num_tiles,
    tile_for,
)

H200 = Device(132, 227 * 1024)
L4 = Device(58, 99 * 1024)
KINDS: tuple[Kind, ...] = ("plain", "channel", "block")
# Hidden size, intermediate size, QKV outputs, and inputs of the output projection.
SIZES = {
    "0.6B": (1024, 3072, 4096, 2048),
    "4B": (2560, 9728, 6144, 4096),
    "8B": (4096, 14336, 6144, 4096),
    "70B": (8192, 28672, 10240, 8192),
    "odd": (896, 4864, 1152, 896),
}


def products(kind: Kind, name: str, num_tokens: int) -> list[Product]:
    hidden, intermediate, qkv, attended = SIZES[name]
    return [
        Product(kind, num_tokens, qkv, hidden),
        Product(kind, num_tokens, hidden, attended),
        Product(kind, num_tokens, intermediate, hidden, is_gated=True),
        Product(kind, num_tokens, hidden, intermediate),
    ]


@pytest.mark.parametrize("device", [H200, L4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_tiles_divide_matrices_and_fit_the_device(device: Device, kind: Kind, name: str) -> None:
    for num_tokens in (1, 17, 64, 65, 128, 129, 256, 257, 8192):
        for product in products(kind, name, num_tokens):
            tile = tile_for(product, device)
            if tile is None:
                continue
            assert product.out_size % tile.outputs == 0
            assert product.in_size % (tile.depth * tile.num_splits) == 0
            assert 2 <= tile.num_stages <= max_stages(tile, product, device)
            # A thread's sums stay in registers.
            num_sums = tile.tokens * tile.outputs * (2 if product.is_gated else 1)
            assert num_sums <= 128 * 32 * tile.num_warps
            if tile.num_splits > 1:
                assert num_tiles(tile, product) * tile.num_splits <= device.num_multiprocessors
                assert tile.tokens * tile.outputs <= MAX_SPLIT_TILE


@pytest.mark.parametrize("kind", KINDS)
def test_few_variants_are_compiled(kind: Kind) -> None:
    chosen: set[tuple[Tile | None, bool]] = set()
    for num_tokens in range(1, 513):
        for product in products(kind, "8B", num_tokens):
            tile = tile_for(product, H200)
            chosen.add((tile and tile._replace(num_splits=min(tile.num_splits, 2)), product.is_gated))
    assert len({tile for tile, _ in chosen if tile}) <= 8


def test_matrices_that_few_tiles_cover_are_split() -> None:
    output = tile_for(Product("channel", 32, 4096, 4096), H200)
    assert output is not None and output.num_splits > 1
    # All inputs are in flight without a split.
    assert (tile := tile_for(Product("channel", 32, 1024, 1024), H200)) and tile.num_splits == 1


@pytest.mark.parametrize("num_tokens", [65, 128, 256])
def test_small_matrices_of_many_tokens_take_small_tiles(num_tokens: int) -> None:
    assert tile_for(Product("channel", num_tokens, 2048, 4096), H200) == Tile(64, 64, 128, 8, 4)
    assert tile_for(Product("channel", num_tokens, 2048, 8192), H200) != Tile(64, 64, 128, 8, 4)


@pytest.mark.parametrize("kind", ["plain", "channel"])
def test_gated_products_up_to_a_limit(kind: Kind) -> None:
    assert tile_for(Product(kind, MAX_TOKENS_GATED, 14336, 4096, is_gated=True), H200)
    assert tile_for(Product(kind, MAX_TOKENS_GATED + 1, 14336, 4096, is_gated=True), H200) is None


def test_indivisible_matrices_use_the_library() -> None:
    for product in (Product("channel", 32, 4112, 4096), Product("channel", 32, 4096, 4112)):
        assert tile_for(product, H200) is None


def test_blocks_are_multiplied_at_any_size() -> None:
    for num_tokens in (1, 256, 8192):
        for device in (H200, L4):
            assert tile_for(Product("block", num_tokens, 4096, 14336), device)
    assert tile_for(Product("block", 32, 14336, 4096, is_gated=True), H200) is None


def gated(name: str, num_tokens: int) -> Product:
    hidden, intermediate, *_ = SIZES[name]
    return Product("plain", num_tokens, intermediate, hidden, is_gated=True)


@pytest.mark.parametrize("name", SIZES)
def test_gated_tiles_of_many_tokens_divide_matrices_and_are_mostly_full(name: str) -> None:
    for num_tokens in range(1, 4096, 37):
        product = gated(name, num_tokens)
        tile = gated_tile_for(product, H200)
        if tile is None:
            continue
        assert num_tokens > 512 and divides(tile, product)
        assert tile.num_stages <= max_stages(tile, product, H200)
        num_waves = -(-num_tiles(tile, product) // H200.num_multiprocessors)
        sums = num_waves * H200.num_multiprocessors * tile.tokens * tile.outputs
        assert num_tokens * product.out_size >= 0.8 * sums


@pytest.mark.parametrize(
    ("name", "num_tokens", "outputs"),
    [
        # None where the library measured faster on an H200, otherwise the fastest tile.
        ("8B", 192, None),
        ("8B", 512, None),
        ("8B", 640, 128),
        ("8B", 768, 128),
        ("8B", 16384, 128),
        ("0.6B", 384, None),
        ("0.6B", 768, None),
        ("0.6B", 640, 128),
        ("0.6B", 1024, 64),
        ("0.6B", 16384, 128),
    ],
)
def test_gated_products_of_many_tokens_use_the_fastest_kernel(name: str, num_tokens: int, outputs: int | None) -> None:
    tile = gated_tile_for(gated(name, num_tokens), H200)
    assert (tile.outputs if tile else None) == outputs


def test_weights_in_fp8_have_no_gated_tile_of_many_tokens() -> None:
    assert gated_tile_for(Product("channel", 4096, 14336, 4096, is_gated=True), H200) is None
