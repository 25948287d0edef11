import pytest

from benchmarks.moves import Load, Stream, describe, percentile
from tandem.v1 import inference_pb2 as pb


def test_gaps_of_a_stream_lie_in_part_in_the_given_time() -> None:
    stream = Stream(pb.GenerateRequest(), times=[1.0, 2.0, 4.0, 4.5])
    assert stream.gaps() == [1.0, 2.0, 0.5]
    assert stream.gaps(2.5, 3.0) == [2.0]
    assert stream.gaps(5.0) == []


@pytest.mark.parametrize(("share", "expected"), [(0.5, 3), (0.99, 4), (0.0, 1)])
def test_percentile_is_one_of_the_values(share: float, expected: int) -> None:
    assert percentile([4, 1, 3, 2], share) == expected
    assert percentile([], share) == 0


def test_description_names_the_longest_gap() -> None:
    assert describe("gaps", [0.01, 0.02, 0.3]) == "  gaps: 3, p50 20 ms, p99 300 ms, longest 300 ms"
    assert describe("gaps", []) == "  gaps: none"


def test_equal_seeds_make_equal_requests() -> None:
    first, second = (Load(None, 2, 100, seed=3) for _ in range(2))  # type: ignore[arg-type]
    for is_sampled in (False, True):
        request = first.make_request(is_sampled=is_sampled)
        assert request == second.make_request(is_sampled=is_sampled)
        assert bool(request.sampling.temperature) == is_sampled
        assert 50 <= request.sampling.max_tokens <= 100
