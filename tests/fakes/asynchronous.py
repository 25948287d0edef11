"""An engine on a CPU that looks as if a device computed for it."""

from collections import Counter

import pytest

from tandem.engine.engine import Engine, _CpuForwardOutput

# A forward is seen to have ended when somebody has looked for that so often, or waited for it.
NUM_LOOKS = 3


def make_asynchronous(patch: pytest.MonkeyPatch) -> None:
    """The next forward is launched before the tokens of the one before are known, though they are there."""
    num_looks: Counter[_CpuForwardOutput] = Counter()
    has_been_chosen, token_ids = _CpuForwardOutput.done, _CpuForwardOutput.token_ids

    def done(self: _CpuForwardOutput) -> bool:
        num_looks[self] += 1
        return num_looks[self] > NUM_LOOKS and has_been_chosen(self)

    def wait(self: _CpuForwardOutput) -> list[int]:
        num_looks[self] = NUM_LOOKS
        return token_ids(self)

    patch.setattr(Engine, "is_asynchronous", True)
    patch.setattr(_CpuForwardOutput, "done", done)
    patch.setattr(_CpuForwardOutput, "token_ids", wait)
    patch.setattr(_CpuForwardOutput, "duration_s", lambda self: 0.0)
