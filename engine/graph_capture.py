"""How forwards become CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# A graph captured too early would hold the lazy set-up of kernels and libraries.
NUM_WARMUPS = 2


class GraphCapture:
    """Captures graphs whose tensors share memory: only one of them may run at a time. Use as a context manager."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All graphs are captured in one CUDA stream: cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._pausing = _collector_paused()

    def __enter__(self) -> "GraphCapture":
        self._pausing.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._pausing.__exit__(*raised)

    def capture(self, run: Callable[[], None], warm_up: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The largest should come first: the smaller ones find room in what it has taken.

        Args:
            run: launches what the graph is to hold, and waits for nothing.
            warm_up: launches each of its kernels once at least, with tensors of the same shapes. It need not launch
                those of all layers, which would take three times as long as capturing them.
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


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keeps Python's garbage collector from running by itself: the device memory that it may find nobody using, such as
    another engine's pool, cannot be freed during a capture, which would fail."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
