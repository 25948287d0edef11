"""Products with steps dealt out evenly against float64, in every kind of tile and with sizes that no tile divides."""

import pytest
import torch

from tandem.engine.layers.balanced_tiles import BalancedTile, tile_of
from tandem.engine.layers.product_tiles import Kind
from tests.gpu.engine.layers.test_products import check, inputs, make

# Instructions of one architecture alone.
CAPABILITY = (9, 0)
# Matrix rows and columns. The last has partial tiles and steps.
MATRICES = (6144, 4096), (1024, 3072), (2032, 1136)
# Outputs, blocks of a cluster, tiles of tokens, and parts.
TILES = [(128, 1, 1, 1), (128, 2, 2, 1), (128, 4, 1, 1), (64, 1, 2, 1), (64, 2, 1, 1)]
TILES += [(128, 1, 1, 3), (128, 1, 1, 4), (128, 1, 2, 2), (128, 1, 1, 8)]
TILES += [(192, 1, 1, 4), (192, 1, 1, 5), (192, 1, 2, 2)]
NUM_TOKENS = 17, 139


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("needs compute capability 9.0")


def tile(num_tokens: int, outputs: int, cluster: int, number: int, parts: int = 1) -> BalancedTile:
    found = tile_of(num_tokens, outputs, cluster, number, 4 if parts == 1 else 1, parts)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["plain", "channel"])
@pytest.mark.parametrize(("num_rows", "in_size"), MATRICES)
@pytest.mark.parametrize(("outputs", "cluster", "number", "parts"), TILES)
def test_products(kind: Kind, num_rows: int, in_size: int, outputs: int, cluster: int, number: int, parts: int) -> None:
    from tandem.engine.layers.balanced_products import BalancedProducts

    products = BalancedProducts(torch.device("cuda", 0))
    for is_gated, has_bias, adds in ((False, False, False), (False, True, True), (True, True, False)):
        linear = make(kind, num_rows, in_size, has_bias)
        for num_tokens in NUM_TOKENS:
            x, exact = inputs(linear, num_tokens)
            residual = torch.randn(num_tokens, num_rows, device="cuda").bfloat16() if adds else None
            added = None if residual is None else residual.clone()
            size = tile(num_tokens, outputs, cluster, number, parts)
            result = products.multiply(x, linear, size, added, is_gated=is_gated)
            check(result, exact, linear, is_gated=is_gated, residual=residual)


@pytest.mark.parametrize("kind", ["plain", "channel"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_products_that_leave_multiprocessors(kind: Kind, cluster: int) -> None:
    from tandem.engine.layers.balanced_products import BalancedProducts

    products = BalancedProducts(torch.device("cuda", 0)).leaving(16)
    linear = make(kind, 4096, 4096)
    for num_tokens in NUM_TOKENS:
        x, exact = inputs(linear, num_tokens)
        size = tile(num_tokens, 64, cluster, 1)._replace(unit=32)
        check(products.multiply(x, linear, size), exact, linear, is_gated=False, residual=None)


@pytest.mark.parametrize("num_tokens", [33, 300, 512, 1024])
def test_a_rows_bits_do_not_depend_on_others(num_tokens: int) -> None:
    from tandem.engine.layers.balanced_products import BalancedProducts

    products = BalancedProducts(torch.device("cuda", 0))
    linear = make("plain", 4096, 4096)
    x, others = (torch.randn(num_tokens, 4096, device="cuda").bfloat16() for _ in range(2))
    row = num_tokens // 2
    others[row] = x[row]
    for cluster, parts in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4)):
        size = tile(num_tokens, 128, cluster, -(-num_tokens // 256), parts)
        results = [products.multiply(numbers, linear, size) for numbers in (x, others, x)]
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[0][row], results[1][row])


def test_consecutive_launches_share_memory_for_partial_sums() -> None:
    """Each starts before the one before has ended."""
    from tandem.engine.layers.balanced_products import BalancedProducts

    products = BalancedProducts(torch.device("cuda", 0))
    linears = [make("plain", 4096, 4096) for _ in range(8)]
    x = torch.randn(96, 4096, device="cuda").bfloat16()
    size = tile(96, 128, 2, 1)
    alone = []
    for linear in linears:
        alone.append(products.multiply(x, linear, size))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = [products.multiply(x, linear, size) for linear in linears]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("max_clusters", [32, 31])
def test_clusters_that_do_not_fit_side_by_side_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch, max_clusters: int
) -> None:
    from tandem.engine.layers import balanced_products
    from tandem.engine.layers.cuda_kernel import CudaKernel

    monkeypatch.setattr(balanced_products, "balanced_tile_for", lambda product: tile(96, 128, 1, 1, 4))
    monkeypatch.setattr(CudaKernel, "max_clusters", lambda kernel, num_threads: max_clusters)
    products = balanced_products.BalancedProducts(torch.device("cuda", 0))
    # 32 tiles.
    chosen = products.tile(96, make("plain", 4096, 4096))
    assert chosen == (tile(96, 128, 1, 1, 4) if max_clusters == 32 else None)


def test_other_gpus_take_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.engine.layers import balanced_products

    monkeypatch.setattr(balanced_products, "balanced_tile_for", lambda product: tile(96, 128, 1, 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    products = balanced_products.BalancedProducts(torch.device("cuda", 0))
    assert products.tile(96, make("plain", 4096, 4096)) is None
