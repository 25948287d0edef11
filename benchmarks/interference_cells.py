"""Loads, figures and aims of the cells of `benchmarks.interference`."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from benchmarks.rows import Row
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.measures import RequestMeasures, distribution
from tandem.bench.records import RequestRecord
from tandem.bench.workloads.synthetic import Lengths
from tandem.lifecycle import PHASES

Distribution = Mapping[str, Any]
CLIENT_TTFT, CLIENT_GAP, CLIENT_ITL = "client: TTFT", "client: first to second", "client: later gaps"
STREAMS_ITL, STREAMS_QUIET_ITL = "streams: ITL", "streams: ITL before arrivals"
# All streams have begun this many seconds after the run's start.
_STREAMS_BEGUN_S = 3.0


@dataclass(frozen=True, slots=True)
class Cell:
    """
    Attributes:
        kind: "alone": prompts one after another; "steady": arrivals beside running streams; "burst": all at once.
        num_runs: runs with different prompts, whose requests are pooled.
        expected_s: duration of the cell, without the arrivals of a "steady" one.
    """

    name: str
    kind: Literal["alone", "steady", "burst"]
    input_tokens: int
    output_tokens: int
    num_prompts: int = 0
    num_runs: int = 1
    rate: float = 0.0
    expected_s: float = 15.0

    @property
    def what(self) -> str:
        match self.kind:
            case "alone":
                return f"{self.num_prompts} prompts of {self.input_tokens:,} tokens, one after another"
            case "steady":
                return f"prompts of {self.input_tokens:,} tokens at {self.rate:g}/s beside streams"
            case "burst":
                return f"{self.num_prompts} prompts of {self.input_tokens:,} tokens at once, {self.num_runs} times"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attributes: seconds: of the arrivals beside streams; lead_s: of the streams before; num_clients: processes."""

    cells: tuple[Cell, ...]
    num_streams: int
    stream_tokens: int
    seconds: float
    lead_s: float
    start_timeout_s: float
    num_clients: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cell.name for cell in self.cells)


DEFAULTS = {
    "cuda": Sizes(
        (
            Cell("lone", "alone", 4096, 16, num_prompts=20),
            Cell("steady-3", "steady", 4096, 64, rate=3.0),
            Cell("steady-6", "steady", 4096, 64, rate=6.0),
            Cell("burst-64x256", "burst", 256, 16, num_prompts=64, num_runs=3),
            Cell("burst-64x512", "burst", 512, 16, num_prompts=64, num_runs=3),
            Cell("burst-256x256", "burst", 256, 16, num_prompts=256, num_runs=3, expected_s=20.0),
            Cell("burst-256x512", "burst", 512, 16, num_prompts=256, num_runs=3, expected_s=25.0),
            Cell("long-32k", "alone", 32_000, 16, num_prompts=4),
        ),
        num_streams=64,
        stream_tokens=2560,
        seconds=20.0,
        lead_s=5.0,
        start_timeout_s=90.0,
        num_clients=4,
    ),
    "cpu": Sizes(
        (
            Cell("lone", "alone", 256, 4, num_prompts=4),
            Cell("steady-3", "steady", 256, 4, rate=0.6),
            Cell("steady-6", "steady", 256, 4, rate=1.2),
            Cell("burst-64x256", "burst", 32, 4, num_prompts=4, num_runs=2),
            Cell("burst-64x512", "burst", 64, 4, num_prompts=4, num_runs=2),
            Cell("burst-256x256", "burst", 32, 4, num_prompts=8, num_runs=2),
            Cell("burst-256x512", "burst", 64, 4, num_prompts=8, num_runs=2),
            Cell("long-32k", "alone", 512, 4, num_prompts=2),
        ),
        num_streams=2,
        stream_tokens=512,
        seconds=4.0,
        lead_s=2.0,
        start_timeout_s=120.0,
        num_clients=1,
    ),
}


def bench_configs(
    cell: Cell, sizes: Sizes, address: str, vocab_size: int, timeout_s: float, first_seed: int | None = None
) -> list[BenchConfig]:
    """Return a cell's runs. No two share a prompt, so that nothing is cached."""
    if first_seed is None:
        first_seed = 1 + 10 * sizes.names.index(cell.name)
    lengths = Lengths(cell.input_tokens, cell.input_tokens), Lengths(cell.output_tokens, cell.output_tokens)
    configs = []
    for seed in range(first_seed, first_seed + cell.num_runs):
        endpoint = EndpointConfig(f"grpc://{address}", timeout_s=timeout_s)
        shared: dict[str, Any] = {"label": cell.name, "num_processes": sizes.num_clients}
        if cell.kind == "steady":
            workload = WorkloadConfig(
                "steady-streams",
                input_lengths=lengths[0],
                output_lengths=lengths[1],
                num_streams=sizes.num_streams,
                stream_output_tokens=sizes.stream_tokens,
                spread_streams=True,
                lead_s=sizes.lead_s,
                vocab_size=vocab_size,
                seed=seed,
            )
            arrivals = ArrivalConfig("poisson", cell.rate)
            configs.append(BenchConfig(endpoint, workload, arrivals, duration_s=sizes.lead_s + sizes.seconds, **shared))
            continue
        workload = WorkloadConfig("synthetic", cell.num_prompts, *lengths, vocab_size=vocab_size, seed=seed)
        # The whole burst leaves at the run's beginning, whatever the rate.
        burst = ArrivalConfig("burst", rate=1.0, burst_size=cell.num_prompts)
        arrivals = burst if cell.kind == "burst" else ArrivalConfig("closed")
        configs.append(BenchConfig(endpoint, workload, arrivals, **shared))
    return configs


def num_not_whole(records: Sequence[RequestRecord]) -> int:
    """Count requests without a whole answer, except streams cut by the run's end."""
    return sum(record.error not in (("", "cut") if record.group == "streams" else ("",)) for record in records)


def distributions(records: Sequence[RequestRecord]) -> dict[str, Distribution]:
    """Return the phases and the clients' measures of whole requests, in milliseconds."""
    requests = [record for record in records if record.group == "requests" and not record.error]
    streams = [record for record in records if record.group == "streams"]
    measures = [RequestMeasures.of(record) for record in requests]
    found: dict[str, Distribution | None] = {
        spec.name: distribution(r.phases_ms[spec.name] for r in requests if spec.name in r.phases_ms) for spec in PHASES
    }
    found[CLIENT_TTFT] = _ms(one.ttft for one in measures)
    found[CLIENT_GAP] = _ms(one.gaps[0] if one.gaps else None for one in measures)
    found[CLIENT_ITL] = _ms(gap for one in measures for gap in one.gaps[1:])
    if streams and requests:
        begin, end = min(record.due_s for record in requests), max(record.ended_s for record in requests)
        found[STREAMS_QUIET_ITL] = _ms(_gaps_within(streams, min(_STREAMS_BEGUN_S, begin / 2), begin))
        found[STREAMS_ITL] = _ms(_gaps_within(streams, begin, end))
    return {name: values for name, values in found.items() if values is not None}


def rows_of(
    cell: Cell,
    records: Sequence[RequestRecord],
    found: Mapping[str, Distribution],
    own_copy_ms: float | None,
    lone_ttft_ms: float | None,
) -> list[Row]:
    """Return a cell's figures and aims.

    Args:
        own_copy_ms: time of one prompt's pages at the link's plain rate, or None.
        lone_ttft_ms: median TTFT of prompts alone on the cluster, or None.
    """
    rows = [Row("requests that are whole", len(records) - num_not_whole(records), "", low=len(records))]

    def add(name: str, of: str, what: str, high: float | None = None) -> None:
        if of in found:
            rows.append(Row(name, found[of][what], "ms", high=high))

    def add_ratio(name: str, value: float, high: float | None) -> None:
        rows.append(Row(name, value, "", high=high))

    add("TTFT p50", CLIENT_TTFT, "p50")
    match cell.kind:
        case "steady":
            add("first_to_second p50", "first_to_second", "p50", 18.0)
            add("first_to_second p99", "first_to_second", "p99", 30.0)
            add("client's gap after the first token, p50", CLIENT_GAP, "p50")
            add("client's gap after the first token, p99", CLIENT_GAP, "p99")
            add("streams' ITL before arrivals, p50", STREAMS_QUIET_ITL, "p50")
            add("streams' ITL p50", STREAMS_ITL, "p50")
            add("streams' ITL p99", STREAMS_ITL, "p99")
            if STREAMS_ITL in found:
                add_ratio("streams' ITL p99 / p50", found[STREAMS_ITL]["p99"] / found[STREAMS_ITL]["p50"], 1.2)
                add_ratio("streams' ITL p99 / p50 of its second", _p99_of_its_second(records), 1.2)
            if lone_ttft_ms is not None and CLIENT_TTFT in found:
                high = 1.05 if cell.name == "steady-3" else None
                add_ratio("TTFT p50 / that of lone", found[CLIENT_TTFT]["p50"] / lone_ttft_ms, high)
        case "burst":
            for phase in ("handover", "transfer", "decode_queue"):
                add(f"{phase} p50", phase, "p50")
                add(f"{phase} p99", phase, "p99")
            add("handover, longest", "handover", "max")
            add("decode step, by later gaps, p50", CLIENT_ITL, "p50")
            if own_copy_ms is not None and "handover" in found and CLIENT_ITL in found:
                rows.append(Row("own copy at the link's plain rate", own_copy_ms, "ms"))
                beyond, step = found["handover"]["p99"] - own_copy_ms, found[CLIENT_ITL]["p50"]
                rows.append(Row("handover p99 beyond its own copy", beyond, "ms", high=step + 5.0))
        case "alone":
            is_long = cell.name == "long-32k"
            add("first_to_second p50", "first_to_second", "p50", None if is_long else 12.0)
            add("handover p50", "handover", "p50", 8.0 if is_long else None)
            add("handover, longest", "handover", "max", 8.0 if is_long else None)
            add("client's gap after the first token, p50", CLIENT_GAP, "p50")
            add("client's later gaps, p50", CLIENT_ITL, "p50")
    return rows


def _gaps_within(records: Iterable[RequestRecord], begin_s: float, end_s: float) -> Iterator[float]:
    for record in records:
        for before, after in pairwise(record.times):
            if begin_s < after <= end_s:
                yield after - before


def _p99_of_its_second(records: Sequence[RequestRecord]) -> float:
    """Return the p99 of streams' gaps over the median gap of the same second, while requests are served.

    Growing contexts lengthen steps, which is not interference.
    """
    requests = [record for record in records if record.group == "requests" and not record.error]
    begin, end = min(record.due_s for record in requests), max(record.ended_s for record in requests)
    by_second: dict[int, list[float]] = defaultdict(list)
    for record in records:
        if record.group == "streams":
            for before, after in pairwise(record.times):
                if begin < after <= end:
                    by_second[int(after)].append(after - before)
    medians = {second: statistics.median(gaps) for second, gaps in by_second.items()}
    found = distribution(gap / medians[second] for second, gaps in by_second.items() for gap in gaps)
    assert found is not None
    return float(found["p99"])


def _ms(seconds: Iterable[float | None]) -> Distribution | None:
    return distribution(value * 1e3 for value in seconds if value is not None)
