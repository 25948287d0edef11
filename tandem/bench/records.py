"""What a run keeps of each request: moments and counts, from which every measure is computed afterwards."""

from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

# Of the requests themselves, and of the long streams that run beside them (workloads/steady_streams.py).
Group = Literal["requests", "streams"]
GROUPS: tuple[Group, ...] = ("requests", "streams")

# Where the number of a chunk's tokens comes from, the most exact first.
#   token_ids         the chunk has them
#   continuous_usage  the server counts with each chunk
#   usage             the server counts at the end, and as many chunks came as tokens: one each
#   characters        the server counts at the end, and its count is shared out by the length of the chunks' texts
#   length            the server does not count, but says that the output has the wanted length: shared out likewise
#   chunks            the server does not count: each chunk is taken for one token
CountedBy = Literal["", "token_ids", "continuous_usage", "usage", "characters", "length", "chunks"]

# Why a request has no whole answer; "" where it has.
#   refused      the server said no: an invalid request, a wrong key, a full queue
#   unreachable  no connection
#   failed       the server's own failure, or a stream that broke
#   timeout      no end within --timeout
#   too_short    fewer tokens than asked for, though the end of the sequence was to be ignored
#   cut          the run was ended first: it counts neither as good nor as failed
ErrorKind = Literal["", "refused", "unreachable", "failed", "timeout", "too_short", "cut"]


@dataclass(slots=True)
class RequestRecord:
    """All moments are in seconds from the run's start, on a monotonic clock that all client processes share.

    Attributes:
        index: of the request in the workload.
        due_s: when it should have left; without an arrival time of its own, when it did.
        sent_s: when it left.
        ended_s: when its answer was over, whichever way.
        times: when each chunk with something of the output came.
        counts: how many tokens each of these chunks had.
        num_output_tokens: as the server counted, or the sum of `counts` where it did not.
        prompt_tokens, cached_tokens: as the server counted; None: it did not say.
        phases_ms: what each phase took by the server's own timeline, where it tells one (gRPC).
        output_digest: of a whole answer's tokens, or of its text where there are none: equal answers have equal ones.
    """

    index: int
    group: Group
    due_s: float
    sent_s: float
    wanted_input_tokens: int
    wanted_output_tokens: int
    is_warmup: bool = False
    ended_s: float = 0.0
    times: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("I"))
    counted_by: CountedBy = ""
    num_output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    phases_ms: dict[str, float] = field(default_factory=dict)
    output_digest: str = ""
    error: ErrorKind = ""
    detail: str = ""

    @property
    def lateness_s(self) -> float:
        return self.sent_s - self.due_s

    def to_json(self) -> dict[str, Any]:
        """As a line of --requests-out."""
        return {
            "index": self.index,
            "group": self.group,
            "warmup": self.is_warmup,
            "due_s": round(self.due_s, 6),
            "sent_s": round(self.sent_s, 6),
            "ended_s": round(self.ended_s, 6),
            "wanted_input_tokens": self.wanted_input_tokens,
            "wanted_output_tokens": self.wanted_output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.num_output_tokens,
            "counted_by": self.counted_by,
            "phases_ms": {name: round(took, 3) for name, took in self.phases_ms.items()},
            "output_digest": self.output_digest,
            "error": self.error,
            "detail": self.detail,
            "times_s": [round(moment, 6) for moment in self.times],
            "counts": list(self.counts),
        }
