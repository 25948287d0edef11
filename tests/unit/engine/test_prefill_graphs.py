import itertools

from tandem.engine.prefill_graphs import SIZES


def test_sizes_are_close() -> None:
    assert list(SIZES) == sorted(set(SIZES)) and SIZES[-1] == 2048
    for smaller, larger in itertools.pairwise(SIZES):
        assert larger - smaller <= max(16, larger / 5)
