import pytest

from benchmarks.thousand.measures import run


@pytest.mark.parametrize("linked", [False, True])
def test_requests_flow_through_a_small_cluster(linked: bool) -> None:
    found = {one.name: one.value for one in run(8, 2, linked, "least_cost", 4.0, 0.5)}
    assert found["start: links"] * 1000 == (8 * 7 if linked else 4 * 4)
    # Half of 32 requests a second, each of which had all its tokens and ended.
    assert 14 <= found["requests of a router"] <= 18
    assert found["  Tokens"] > 0 and found["  from routers"] > 0 and found["  CachedPrefixes"] > 0
    assert found["frame of the live page"] > 0 and found["tandem status"] > 0
    assert found["  peers sent"] > 0
