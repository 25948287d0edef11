"""Records of requests for tests."""

from array import array
from collections.abc import Sequence
from typing import Any

from tandem.bench.records import RequestRecord


def record(times: Sequence[float], *, due_s: float = 0.0, index: int = 0, **more: Any) -> RequestRecord:
    """One token per chunk, unless `counts` differs."""
    counts = array("I", more.pop("counts", [1] * len(times)))
    made = RequestRecord(index, more.pop("group", "requests"), due_s, more.pop("sent_s", due_s), 10, len(times))
    made.times, made.counts = array("d", times), counts
    made.num_output_tokens = sum(counts)
    made.ended_s = times[-1] if times else due_s
    made.counted_by = "token_ids"
    for name, value in more.items():
        setattr(made, name, value)
    return made
