"""Configuration of a run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.goodput import Slo
from tandem.bench.workloads.prompts import DEFAULT_VOCAB_SIZE, FIRST_TOKEN_ID, PromptAs
from tandem.bench.workloads.synthetic import Lengths

WorkloadKind = Literal["synthetic", "multi-turn", "steady-streams", "mooncake", "azure"]
WORKLOADS: tuple[WorkloadKind, ...] = ("synthetic", "multi-turn", "steady-streams", "mooncake", "azure")
TRACES: tuple[WorkloadKind, ...] = ("mooncake", "azure")


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """
    Attributes:
        num_requests: sessions of "multi-turn", requests of other workloads; None: 100, or the whole trace.
        num_turns, think_s: of "multi-turn": turns of a session, and seconds between an answer and the next turn.
        spread_streams: start streams at spread context lengths, as if they had run for a while.
        lead_s: seconds of streams alone before the first arrival.
        time_scale: factor of a trace's times.
    """

    kind: WorkloadKind = "synthetic"
    num_requests: int | None = None
    input_lengths: Lengths = field(default_factory=lambda: Lengths(512, 512))
    output_lengths: Lengths = field(default_factory=lambda: Lengths(128, 128))
    num_system_tokens: int = 0
    num_document_tokens: int = 0
    num_turns: int = 4
    think_s: float = 0.0
    num_streams: int = 8
    stream_input_tokens: int = 64
    stream_output_tokens: int = 4096
    spread_streams: bool = False
    lead_s: float = 3.0
    trace: Path | None = None
    time_scale: float = 1.0
    prompt_as: PromptAs = "ids"
    vocab_size: int = DEFAULT_VOCAB_SIZE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind in TRACES and self.trace is None:
            raise ValueError(f"the workload {self.kind!r} needs a trace (--trace FILE)")
        if self.kind not in TRACES and self.trace is not None:
            raise ValueError(f"a trace is for the workloads {' and '.join(TRACES)} (--workload)")
        if not 0 < self.time_scale < float("inf"):
            raise ValueError(f"the time scale must be above 0, not {self.time_scale}")
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"token ids are drawn from {FIRST_TOKEN_ID} on: the vocabulary must be larger")
        if min(self.num_turns, self.num_streams, self.stream_input_tokens, self.stream_output_tokens) < 1:
            raise ValueError("turns, streams and their lengths must be at least 1")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """
    Attributes:
        arrivals: None: those of the trace.
        duration_s: seconds after which no session starts; None: no limit.
        warmup_requests, warmup_s: first requests, or first seconds, to leave out.
    """

    endpoint: EndpointConfig
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    arrivals: ArrivalConfig | None = field(default_factory=ArrivalConfig)
    duration_s: float | None = None
    warmup_requests: int = 0
    warmup_s: float = 0.0
    slo: Slo | None = None
    num_processes: int = 1
    label: str = ""

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ValueError("at least one client process is needed (--processes)")
        if self.workload.num_requests is not None and self.warmup_requests >= self._num_requests(
            self.workload.num_requests
        ):
            raise ValueError("all requests would warm up, and none be measured (--warmup, --requests)")
        if self.duration_s is not None and self.warmup_s >= self.duration_s:
            raise ValueError("nothing would be measured: warming up takes as long as the run (--warmup, --duration)")
        is_closed = self.arrivals is not None and self.arrivals.kind == "closed"
        if is_closed and self.duration_s is not None and self.workload.num_requests is None:
            raise ValueError("how many requests a closed loop sends in a time is not known: make enough (--requests)")
        if self.endpoint.api == "chat" and self.workload.prompt_as == "ids":
            raise ValueError("chats are text: --prompt-as text")
        if self.arrivals is None and self.workload.kind not in TRACES:
            raise ValueError("only traces have arrival times of their own")
        if self.workload.kind == "steady-streams" and (self.arrivals is None or self.arrivals.kind == "closed"):
            raise ValueError("beside steady streams prompts arrive at a rate (--rate)")

    def _num_requests(self, num_sessions: int) -> int:
        return num_sessions * (self.workload.num_turns if self.workload.kind == "multi-turn" else 1)
