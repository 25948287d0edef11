import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Lazy setup must finish before a capture.
NUM_WARMUPS = 2
# Of a measurement of a graph's time.
NUM_TRIALS = 3


class GraphCapture:
    """Captures graphs whose tensors share memory: only one of them may run at a time. Use as a context manager."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all captures: cuBLAS keeps a workspace for each stream.
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._pausing = _collector_paused()

    def __enter__(self) -> "GraphCapture":
        self._pausing.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._pausing.__exit__(*raised)

    def capture(self, run: Callable[[], None], warm_up: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures one graph, the largest first: smaller graphs then fit into its memory.

        Args:
            warm_up: launches each kernel of `run` at least once, with tensors of the same shapes. One layer is enough;
                all would take three times as long as the capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARMUPS):
                warm_up()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        self._pool = graph.pool()
        return graph


def shortest_s(replay: Callable[[], None]) -> float:
    """Returns the shortest of some replays of a graph, in seconds. Waits for the device."""
    times_s = []
    for _ in range(NUM_TRIALS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        replay()
        ended.record()
        ended.synchronize()
        times_s.append(began.elapsed_time(ended) / 1e3)
    return min(times_s)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """The collector might free device memory, for example another engine's pool, and a capture fails on that."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
