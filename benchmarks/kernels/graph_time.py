"""Times kernels in a CUDA graph. Needs CUDA."""

from collections.abc import Callable

import torch

NUM_RUNS = 7


def median_us(run: Callable[[], object]) -> float:
    """Returns the median microseconds of a graph of the kernels that `run` launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(NUM_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[NUM_RUNS // 2]
