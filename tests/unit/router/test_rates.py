"""What a router sees of handovers and outputs."""

from dataclasses import dataclass, field

import pytest

from router.rates import ClusterRates
from tandem.lifecycle import DECODE_STARTED, FIRST_TOKEN


@dataclass
class Finished:
    moments: dict[str, int] = field(default_factory=dict)
    num_pages_shipped: int = 0
    output_ids: list[int] = field(default_factory=list)


def ns(seconds: float) -> int:
    return int(1e9 * seconds)


def test_handovers_are_timed_where_there_are_two_workers() -> None:
    rates = ClusterRates("cpu")
    for number in range(500):
        num_pages = 100 * (number % 3)
        moments = {FIRST_TOKEN: 0, DECODE_STARTED: ns(0.004 + 1e-5 * num_pages)}
        rates.request_finished(Finished(moments, num_pages, [0] * 50), is_apart=True)
        rates.request_finished(Finished({FIRST_TOKEN: 0, DECODE_STARTED: ns(9.0)}, 0, [0] * 50), is_apart=False)
    assert rates.handover_s == pytest.approx((0.004, 1e-5), rel=0.1)
    assert rates.mean_output_tokens == pytest.approx(50.0)
