import pytest

from tandem.router.observe.histograms import Histogram
from tandem.router.observe.live.history import NUM_POINTS, WINDOW_S, History, Quantiles, quantile

BOUNDS = (0.01, 0.1, 1.0)


def test_quantiles_lie_within_their_bucket() -> None:
    assert quantile(BOUNDS, (0, 0, 0, 0), 0.5) is None
    assert quantile(BOUNDS, (0, 10, 0, 0), 0.5) == pytest.approx(10 + 90 / 2)
    assert quantile(BOUNDS, (99, 0, 1, 0), 0.5) == pytest.approx(10 * 50 / 99)
    assert quantile(BOUNDS, (99, 0, 1, 0), 0.995) == pytest.approx(100 + 900 / 2)
    # Values above the last bound count as the bound.
    assert quantile(BOUNDS, (0, 0, 0, 5), 0.5) == 1000


def test_value_counts_within_window() -> None:
    histogram = Histogram("", BOUNDS)
    quantiles = Quantiles(histogram)
    assert quantiles.next() == (None, None)
    histogram.observe(0.05)
    seen = [quantiles.next()[0] is not None for _ in range(WINDOW_S + 3)]
    assert seen == [True] * WINDOW_S + [False] * 3


def test_the_oldest_points_are_forgotten() -> None:
    history = History(Histogram("", BOUNDS), Histogram("", BOUNDS))
    for second in range(NUM_POINTS + 3):
        history.add(second, prompt_tokens_per_s=0, output_tokens_per_s=0, num_requests=second, num_queued=0)
    points = list(history.since(0))
    assert [points[0].at_s, points[-1].num_requests, len(points)] == [3, NUM_POINTS + 2, NUM_POINTS]
    assert [point.at_s for point in history.since(history.num_points - 2)] == [NUM_POINTS + 1, NUM_POINTS + 2]
