"""Times and counts of each request, from which all measures are computed."""

from array import array
from dataclasses import dataclass, field
from typing import Any, Literal

# Streams are the long ones beside requests (workloads/steady_streams.py).
Group = Literal["requests", "streams"]
GROUPS: tuple[Group, ...] = ("requests", "streams")

# Sources of a chunk's token count, the most exact first.
#   token_ids         ids in the chunk
#   continuous_usage  the server's count with each chunk
#   usage             one per chunk: the server's final count equals the number of chunks
#   characters        the server's final count, divided by text lengths
#   length            the wanted length, if reached, divided likewise
#   chunks            one per chunk, without any count
CountedBy = Literal["", "token_ids", "continuous_usage", "usage", "characters", "length", "chunks"]

# Reasons for an answer that is not whole; "": it is whole.
#   refused      invalid request, wrong key, full queue
#   unreachable  no connection
#   failed       server failure, or a broken stream
#   timeout      longer than --timeout
#   too_short    fewer tokens than requested with ignore_eos
#   cut          ended by the run's end; neither good nor failed
ErrorKind = Literal["", "refused", "unreachable", "failed", "timeout", "too_short", "cut"]


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds from the run's start, on a monotonic clock common to all client processes.

    Attributes:
        index: position in the workload.
        due_s: arrival time; without one, the time of sending.
        times, counts: arrival and tokens of each chunk with output.
        num_output_tokens: the server's count, or the sum of `counts`.
        prompt_tokens, cached_tokens: the server's counts, or None.
        loaded_tokens: cached tokens that came from the page store, by tier (tandem.messages.TierHits.counts).
        phases_ms: the server's own phases (gRPC).
        output_digest: hash of a whole answer's token ids, or else of its text.
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
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    output_digest: str = ""
    error: ErrorKind = ""
    detail: str = ""

    @property
    def lateness_s(self) -> float:
        return self.sent_s - self.due_s

    def to_json(self) -> dict[str, Any]:
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
            "loaded_tokens": self.loaded_tokens,
            "output_tokens": self.num_output_tokens,
            "counted_by": self.counted_by,
            "phases_ms": {name: round(took, 3) for name, took in self.phases_ms.items()},
            "output_digest": self.output_digest,
            "error": self.error,
            "detail": self.detail,
            "times_s": [round(moment, 6) for moment in self.times],
            "counts": list(self.counts),
        }
