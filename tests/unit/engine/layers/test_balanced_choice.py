"""The table of sizes that balanced_products.cu multiplies fastest."""

from tandem.engine.layers.balanced_choice import Choice, Matrix, balanced_tile_for, choices, matrix_of, tiles_of
from tandem.engine.layers.product_tiles import Product

# Kernels of one matrix: an engine compiles them at its start.
MAX_KERNELS = 16


def test_measured_choices_are_valid() -> None:
    for matrix, of_matrix in choices().items():
        sizes = [choice.max_tokens for choice in of_matrix]
        assert sizes == sorted(set(sizes)), matrix
        for before, choice in zip([Choice(0, 0), *of_matrix], of_matrix, strict=False):
            for num_tokens in (before.max_tokens + 1, choice.max_tokens):
                product = Product(matrix.kind, num_tokens, matrix.out_size, matrix.in_size, matrix.is_gated)
                tile = balanced_tile_for(product)
                assert (tile is not None) == (choice.num_token_tiles > 0), (matrix, choice)
        assert len({tile._replace(unit=0) for tile in tiles_of(matrix)}) <= MAX_KERNELS
        assert balanced_tile_for(Product(matrix.kind, sizes[-1] + 1, *matrix[2:], matrix.is_gated)) is None


def test_unmeasured_matrices_have_no_tile() -> None:
    assert Matrix("plain", False, 4095, 1) not in choices()
    product = Product("plain", 64, 4095, 1)
    assert balanced_tile_for(product) is None
    assert not tiles_of(matrix_of(product))
