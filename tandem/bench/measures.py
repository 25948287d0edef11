"""What is computed from the moments of each request: latencies, throughputs, and their distributions.

docs/bench.md has each formula.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tandem.bench.records import RequestRecord

PERCENTS = (50, 90, 95, 99)
# Of a distribution, for plots that compare runs: enough for a smooth curve, with its upper end in detail.
CURVE = (*range(100), 99.5, 99.9, 100)
# Names of the measures in seconds, in the order in which they are shown.
LATENCIES = ("ttft", "ttft_from_sent", "tpot", "itl", "itl_p95", "itl_max", "e2e")


@dataclass(frozen=True, slots=True)
class RequestMeasures:
    """Of one request, in seconds; None where it has none, as a request of one token has no gap.

    Attributes:
        ttft: from when it should have left to its first chunk.
        ttft_from_sent: from when it left.
        tpot: from the first chunk to the last, for each token but the first.
        gaps: between each chunk and the next.
        e2e: from when it should have left to the end of its answer.
    """

    ttft: float | None
    ttft_from_sent: float | None
    tpot: float | None
    gaps: Sequence[float]
    itl_p95: float | None
    itl_max: float | None
    e2e: float

    @classmethod
    def of(cls, record: RequestRecord) -> "RequestMeasures":
        times, num_tokens = record.times, record.num_output_tokens
        gaps = [after - before for before, after in pairwise(times)]
        in_order = sorted(gaps)
        return cls(
            ttft=times[0] - record.due_s if times else None,
            ttft_from_sent=times[0] - record.sent_s if times else None,
            tpot=(times[-1] - times[0]) / (num_tokens - 1) if times and num_tokens > 1 else None,
            gaps=gaps,
            itl_p95=percentile(in_order, 95) if gaps else None,
            itl_max=in_order[-1] if gaps else None,
            e2e=record.ended_s - record.due_s,
        )


def percentile(in_order: Sequence[float], percent: float) -> float:
    """With linear interpolation between the two nearest values, as numpy's default is. Args: in_order: not empty."""
    place = (len(in_order) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(in_order) - 1)
    return in_order[below] + (in_order[above] - in_order[below]) * (place - below)


def distribution(values: Iterable[float]) -> dict[str, Any] | None:
    """Of some values: how many, mean, percentiles, extremes and a curve of percentiles; None of none."""
    in_order = sorted(values)
    if not in_order:
        return None
    return {
        "count": len(in_order),
        "mean": math.fsum(in_order) / len(in_order),
        **{f"p{percent}": percentile(in_order, percent) for percent in PERCENTS},
        "min": in_order[0],
        "max": in_order[-1],
        "curve": [percentile(in_order, percent) for percent in CURVE],
    }


def _num_cached_tokens(records: Sequence[RequestRecord]) -> int | None:
    """None if the server has said of no request how many there were, which is not none."""
    told = [record.cached_tokens for record in records if record.cached_tokens is not None]
    return sum(told) if told else None


def summarize(records: Sequence[RequestRecord], window: tuple[float, float] | None = None) -> dict[str, Any]:
    """All measures of some requests, of which those that warmed up are left out.

    Args:
        window: count only the chunks, and the gaps that end, between these moments; None: all. For streams that run
            beside others: their own beginning and end are not what is measured, so they have no TTFT and no E2E.
    """
    measured = [record for record in records if not record.is_warmup]
    whole = [record for record in measured if not record.error]
    kept = [_within(record, *window) for record in measured if record.error in ("", "cut")] if window else whole
    measures = [RequestMeasures.of(record) for record in kept]
    errors = Counter(record.error for record in measured if record.error not in ("", "cut"))
    examples: dict[str, str] = {}
    for record in measured:
        if record.error:
            examples.setdefault(record.error, record.detail)
    begin, end = window or (
        min((record.due_s for record in measured), default=0.0),
        max((record.ended_s for record in measured), default=0.0),
    )
    gaps = [gap for one in measures for gap in one.gaps]
    num_output = sum(_tokens_within(record, *window) if window else record.num_output_tokens for record in kept)
    num_input = sum(_input_tokens(record) for record in whole)
    seconds = max(end - begin, 1e-9)
    num_chunks = sum(len(record.times) for record in kept)
    latencies: dict[str, Iterable[float | None]] = {
        "ttft": (one.ttft for one in measures) if window is None else (),
        "ttft_from_sent": (one.ttft_from_sent for one in measures) if window is None else (),
        "tpot": (one.tpot for one in measures),
        "itl": gaps,
        "itl_p95": (one.itl_p95 for one in measures),
        "itl_max": (one.itl_max for one in measures),
        "e2e": (one.e2e for one in measures) if window is None else (),
    }
    return {
        "num_requests": len(measured),
        "num_whole": len(whole),
        "num_without_output": sum(not record.times for record in whole),
        "num_cut": sum(record.error == "cut" for record in measured),
        "num_warmup": len(records) - len(measured),
        "errors": dict(errors),
        "error_examples": {kind: detail for kind, detail in examples.items() if kind != "cut"},
        "begin_s": begin,
        "duration_s": seconds,
        "requests_per_s": len(whole) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "input_tokens_per_s": num_input / seconds,
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "num_cached_tokens": _num_cached_tokens(whole),
        "wanted_input_tokens": sum(record.wanted_input_tokens for record in whole),
        "tokens_per_chunk": sum(record.num_output_tokens for record in kept) / num_chunks if num_chunks else 0.0,
        "counted_by": dict(Counter(record.counted_by for record in kept if record.counted_by)),
        "longest_gap": max(gaps, default=None),
        **{name: distribution(value for value in latencies[name] if value is not None) for name in LATENCIES},
    }


def _within(record: RequestRecord, begin: float, end: float) -> RequestRecord:
    """With the chunks between these moments, and the one before, with which the first gap that ends there begins."""
    first = max(bisect_left(record.times, begin) - 1, 0)
    last = bisect_right(record.times, end)
    counts = record.counts[first:last]
    return replace(record, times=record.times[first:last], counts=counts, num_output_tokens=sum(counts))


def _tokens_within(record: RequestRecord, begin: float, end: float) -> int:
    """Without the chunk before, which `_within` keeps for the gap that begins with it."""
    return sum(count for moment, count in zip(record.times, record.counts, strict=False) if begin <= moment <= end)


def _input_tokens(record: RequestRecord) -> int:
    return record.wanted_input_tokens if record.prompt_tokens is None else record.prompt_tokens
