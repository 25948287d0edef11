import time

import torch

from tandem.engine.expert_balance import READ_INTERVAL_S, ExpertBalance
from tandem.engine.layers.experts.counts import ExpertCounts
from tests.fakes.clock import FakeClock

DEVICE = torch.device("cuda")
# About half a second at 2 GHz.
BUSY_CYCLES = 1_000_000_000


def test_reading_waits_for_no_forward_pass() -> None:
    counts, clock = ExpertCounts(range(48), 128, 48, DEVICE), FakeClock()
    balance = ExpertBalance(counts, clock)
    counts.counts += 1000
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    counts.counts += 1
    clock.advance(READ_INTERVAL_S)
    began = time.perf_counter()
    for _ in range(3):
        balance.poll()
    took_s = time.perf_counter() - began
    # Counted by a later forward pass.
    counts.counts += 5
    assert balance.groups[0].num_tokens == 0
    torch.cuda.synchronize()
    assert time.perf_counter() - began > 10 * took_s
    balance.poll()
    assert [group.num_tokens for group in balance.groups] == [6 * 128 * 1001] * 8
    assert [group.num_within[0] for group in balance.groups] == [6] * 8
