"""Measures one GPU's rates, the input of engine/floors.py."""

from collections.abc import Callable

import torch

from tandem.engine.floors import Limits

COPIED_BYTES = 2**30
MATMUL_SIZE = 8192
NUM_RUNS = 20
SUSTAINED_S = 2.0


def measure_limits() -> Limits:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    copy_s = _device_seconds(lambda: target.copy_(source))
    return Limits(2 * COPIED_BYTES / copy_s, _matmul_rate(_matmul()))


def sustained_matmul_rate() -> float:
    """Return the matmul rate after SUSTAINED_S of load, which lowers the clock at the power limit."""
    matmul = _matmul()
    num_runs = round(SUSTAINED_S * _matmul_rate(matmul) / (2 * MATMUL_SIZE**3))
    for _ in range(num_runs):
        matmul()
    return _matmul_rate(matmul)


def _matmul() -> Callable[[], object]:
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    return lambda: torch.mm(a, b)


def _matmul_rate(matmul: Callable[[], object]) -> float:
    return 2 * MATMUL_SIZE**3 / _device_seconds(matmul)


def _device_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[NUM_RUNS // 2]
