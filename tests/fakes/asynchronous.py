"""A CPU engine that behaves like an asynchronous device."""

from collections import Counter

import pytest

from tandem.engine.engine import Engine
from tandem.engine.engine_outputs import CpuForwardOutput

# A forward pass counts as done after this many polls, or once it is awaited.
NUM_LOOKS = 3


def make_asynchronous(patch: pytest.MonkeyPatch) -> None:
    """Make the engine launch a forward pass before it reads the previous one's tokens."""
    num_looks: Counter[CpuForwardOutput] = Counter()
    has_been_chosen, token_ids = CpuForwardOutput.done, CpuForwardOutput.token_ids

    def done(self: CpuForwardOutput) -> bool:
        num_looks[self] += 1
        return num_looks[self] > NUM_LOOKS and has_been_chosen(self)

    def wait(self: CpuForwardOutput) -> list[int]:
        num_looks[self] = NUM_LOOKS
        return token_ids(self)

    patch.setattr(Engine, "is_asynchronous", True)
    patch.setattr(CpuForwardOutput, "done", done)
    patch.setattr(CpuForwardOutput, "token_ids", wait)
    patch.setattr(CpuForwardOutput, "duration_s", lambda self: 0.0)
