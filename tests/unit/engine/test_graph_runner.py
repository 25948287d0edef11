import pytest

from tandem.engine.graph_runner import graph_sizes


@pytest.mark.parametrize(
    ("largest", "sizes"), [(0, []), (1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_graphs_end_at_the_largest_batch(largest: int, sizes: list[int]) -> None:
    assert graph_sizes(largest) == sizes
