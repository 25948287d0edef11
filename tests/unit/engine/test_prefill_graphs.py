"""Which prefills run as CUDA graphs."""

import itertools
from collections.abc import Callable

import pytest

from engine.base import EngineBase
from engine.batch import Batch
from engine.kvcache.pool import CpuKvPool
from engine.output import ForwardOutput
from engine.prefill_graphs import SIZES, launch_bound_sizes
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.page_layout import OpaqueLayout

LAUNCH_S = 0.010


class Device(EngineBase):
    """A launch takes the host LAUNCH_S whatever is launched, each token the device so many seconds."""

    def __init__(self, clock: FakeClock, token_s: float, held_up: Callable[[int], float] = lambda number: 0.0) -> None:
        """Args: held_up: for how long the host is, as it waits for the forward of this number."""
        super().__init__(CpuKvPool(OpaqueLayout(4, 32), 1, "launch-bound"))
        self._clock = clock
        self._token_s = token_s
        self._held_up = held_up
        self._num_forwards = 0

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        output = FakeEngine(len(batch.sequences[0].page_ids), 4).forward(batch)
        ends = self._clock() + batch.num_tokens * self._token_s
        self._clock.advance(LAUNCH_S)
        token_ids = output.token_ids
        held_up_s = self._held_up(self._num_forwards)
        self._num_forwards += 1

        def wait() -> list[int]:
            self._clock.advance(max(0.0, ends - self._clock()) + held_up_s)
            return token_ids()

        output.token_ids = wait  # type: ignore[method-assign]
        return output


@pytest.mark.parametrize(
    ("token_s", "largest"),
    [(LAUNCH_S / 1e6, 2048), (LAUNCH_S / 1024, 1024), (LAUNCH_S / 500, 512), (LAUNCH_S / 400, 256), (LAUNCH_S, 0)],
)
def test_graphs_are_of_what_takes_longer_to_launch_than_to_compute(token_s: float, largest: int) -> None:
    clock = FakeClock()
    sizes = launch_bound_sizes(Device(clock, token_s), 8192, clock)
    assert max(sizes, default=0) == largest
    assert sizes == tuple(size for size in SIZES if size <= largest)


@pytest.mark.parametrize("when", range(2))
def test_a_host_that_is_held_up_now_and_then_has_graphs_all_the_same(when: int) -> None:
    clock = FakeClock()
    device = Device(clock, LAUNCH_S / 500, lambda number: LAUNCH_S if number % 2 == when else 0.0)
    assert max(launch_bound_sizes(device, 8192, clock), default=0) == 512


def test_none_is_larger_than_the_largest_forward() -> None:
    clock = FakeClock()
    assert max(launch_bound_sizes(Device(clock, 0.0), 300, clock)) == 256


def test_sizes_are_near_each_other() -> None:
    assert list(SIZES) == sorted(set(SIZES)) and SIZES[-1] == 2048
    for smaller, larger in itertools.pairwise(SIZES):
        assert larger - smaller <= max(16, larger / 5)
