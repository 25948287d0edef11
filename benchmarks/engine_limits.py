"""What one GPU can do at best: its rates, measured. engine/floors.py has the times that follow from them."""

from collections.abc import Callable

import torch

from engine.floors import Limits

COPIED_BYTES = 2**30
MATMUL_SIZE = 8192
NUM_RUNS = 20


def measure_limits() -> Limits:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    copy_s = _device_seconds(lambda: target.copy_(source))
    matmul_s = _device_seconds(lambda: torch.mm(a, b))
    return Limits(2 * COPIED_BYTES / copy_s, 2 * MATMUL_SIZE**3 / matmul_s)


def _device_seconds(run: Callable[[], object]) -> float:
    """Median of several."""
    times = []
    for _ in range(NUM_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[NUM_RUNS // 2]
