"""Latencies and throughputs from the times of chunks; docs/bench.md has the formulas."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypedDict

from tandem.bench.records import RequestRecord

PERCENTS = (50, 90, 95, 99)
# Percentiles of a distribution's curve, for plots.
CURVE = (*range(100), 99.5, 99.9, 100)


class Distribution(TypedDict):
    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    curve: list[float]


class Summary(TypedDict):
    """Measures of a group of requests, as in a result's JSON, in seconds. Warm-up requests count only in num_warmup.

    Attributes:
        num_cut: requests cut by the run's end.
        errors, error_examples: number and one detail per kind of error, without cut requests.
        requests_per_s, input_tokens_per_s: of whole requests.
        num_loaded_tokens: cached tokens that came from the page store, by tier; empty if none did.
        counted_by: requests by the source of their token counts.
    """

    num_requests: int
    num_whole: int
    num_without_output: int
    num_cut: int
    num_warmup: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    begin_s: float
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    num_loaded_tokens: dict[str, int]
    wanted_input_tokens: int
    tokens_per_chunk: float
    counted_by: dict[str, int]
    longest_gap: float | None
    ttft: Distribution | None
    ttft_from_sent: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    itl_p95: Distribution | None
    itl_max: Distribution | None
    e2e: Distribution | None


@dataclass(frozen=True, slots=True)
class RequestMeasures:
    """Measures of one request, in seconds; None without a value, such as the TPOT of a single token.

    Attributes:
        ttft, e2e: from the due time to the first chunk, or to the end of the answer.
        ttft_from_sent: from sending to the first chunk.
        tpot: from the first chunk to the last, per token after the first.
        gaps: between consecutive chunks.
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
    """Interpolate linearly between the two nearest values, like numpy's default. Args: in_order: not empty."""
    place = (len(in_order) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(in_order) - 1)
    return in_order[below] + (in_order[above] - in_order[below]) * (place - below)


def distribution(values: Iterable[float]) -> Distribution | None:
    in_order = sorted(values)
    if not in_order:
        return None
    p50, p90, p95, p99 = (percentile(in_order, percent) for percent in PERCENTS)
    return {
        "count": len(in_order),
        "mean": math.fsum(in_order) / len(in_order),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "min": in_order[0],
        "max": in_order[-1],
        "curve": [percentile(in_order, percent) for percent in CURVE],
    }


def summarize(records: Sequence[RequestRecord]) -> Summary:
    measured = [record for record in records if not record.is_warmup]
    whole = [record for record in measured if not record.error]
    begin = min((record.due_s for record in measured), default=0.0)
    end = max((record.ended_s for record in measured), default=0.0)
    num_output = sum(record.num_output_tokens for record in whole)
    summary = _summarize(records, whole, begin, end, num_output)
    measures = [RequestMeasures.of(record) for record in whole]
    summary["ttft"] = _spread(one.ttft for one in measures)
    summary["ttft_from_sent"] = _spread(one.ttft_from_sent for one in measures)
    summary["e2e"] = _spread(one.e2e for one in measures)
    return summary


def summarize_within(records: Sequence[RequestRecord], begin: float, end: float) -> Summary:
    """Summarize streams between two moments, including streams cut by the run's end.

    Counts chunks, and gaps that end, between the moments. TTFT and E2E are None: a stream's own start and end do not
    count.
    """
    measured = [record for record in records if not record.is_warmup]
    running = [_within(record, begin, end) for record in measured if record.error in ("", "cut")]
    num_output = sum(_tokens_within(record, begin, end) for record in running)
    return _summarize(records, running, begin, end, num_output)


def _summarize(
    records: Sequence[RequestRecord], timed: Sequence[RequestRecord], begin: float, end: float, num_output: int
) -> Summary:
    """Args: timed: requests with measures."""
    measured = [record for record in records if not record.is_warmup]
    whole = [record for record in measured if not record.error]
    failed = [record for record in measured if record.error not in ("", "cut")]
    examples: dict[str, str] = {}
    for record in failed:
        examples.setdefault(record.error, record.detail)
    measures = [RequestMeasures.of(record) for record in timed]
    gaps = [gap for one in measures for gap in one.gaps]
    num_input = sum(map(_input_tokens, whole))
    num_chunks = sum(len(record.times) for record in timed)
    seconds = max(end - begin, 1e-9)
    return {
        "num_requests": len(measured),
        "num_whole": len(whole),
        "num_without_output": sum(not record.times for record in whole),
        "num_cut": sum(record.error == "cut" for record in measured),
        "num_warmup": len(records) - len(measured),
        "errors": dict(Counter(record.error for record in failed)),
        "error_examples": examples,
        "begin_s": begin,
        "duration_s": seconds,
        "requests_per_s": len(whole) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "input_tokens_per_s": num_input / seconds,
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "num_cached_tokens": _num_cached_tokens(whole),
        "num_loaded_tokens": _num_loaded_tokens(whole),
        "wanted_input_tokens": sum(record.wanted_input_tokens for record in whole),
        "tokens_per_chunk": sum(record.num_output_tokens for record in timed) / num_chunks if num_chunks else 0.0,
        "counted_by": dict(Counter(record.counted_by for record in timed if record.counted_by)),
        "longest_gap": max(gaps, default=None),
        "ttft": None,
        "ttft_from_sent": None,
        "tpot": _spread(one.tpot for one in measures),
        "itl": distribution(gaps),
        "itl_p95": _spread(one.itl_p95 for one in measures),
        "itl_max": _spread(one.itl_max for one in measures),
        "e2e": None,
    }


def _spread(values: Iterable[float | None]) -> Distribution | None:
    return distribution(value for value in values if value is not None)


def _num_cached_tokens(records: Sequence[RequestRecord]) -> int | None:
    known = [record.cached_tokens for record in records if record.cached_tokens is not None]
    return sum(known) if known else None


def _num_loaded_tokens(records: Sequence[RequestRecord]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record.loaded_tokens)
    return dict(counts)


def _within(record: RequestRecord, begin: float, end: float) -> RequestRecord:
    """Keep the chunks in the window, and the chunk before, where the first gap starts."""
    first = max(bisect_left(record.times, begin) - 1, 0)
    last = bisect_right(record.times, end)
    counts = record.counts[first:last]
    return replace(record, times=record.times[first:last], counts=counts, num_output_tokens=sum(counts))


def _tokens_within(record: RequestRecord, begin: float, end: float) -> int:
    return sum(count for moment, count in zip(record.times, record.counts, strict=False) if begin <= moment <= end)


def _input_tokens(record: RequestRecord) -> int:
    return record.wanted_input_tokens if record.prompt_tokens is None else record.prompt_tokens
