"""The JSON result of one run, for tables, plots and reports."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.bench.client_health import client_summary, warnings_about
from tandem.bench.config import BenchConfig
from tandem.bench.goodput import goodput
from tandem.bench.measures import percentile, summarize, summarize_within
from tandem.bench.processes import RunResult
from tandem.bench.records import RequestRecord

FORMAT = 1
NUM_BUCKETS = 400


def make_result(config: BenchConfig, run: RunResult) -> dict[str, Any]:
    requests = [record for record in run.records if record.group == "requests"]
    streams = [record for record in run.records if record.group == "streams"]
    summary = summarize(requests)
    result: dict[str, Any] = {
        "format": FORMAT,
        "tool": f"tandem bench {__version__}",
        "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "label": config.label or config.endpoint.url,
        "is_whole": run.is_whole,
        "config": _config_json(config),
        "server": asdict(run.server),
        "requests": summary,
        "client": client_summary(run),
    }
    if config.slo is not None:
        result["goodput"] = goodput(requests, config.slo, summary["duration_s"])
    if streams:
        begin = summary["begin_s"]
        result["streams"] = summarize_within(streams, begin, begin + summary["duration_s"])
    result["series"] = {
        "arrivals_s": sorted(round(record.sent_s, 4) for record in requests),
        "itl": _gaps_over_time(streams or requests),
    }
    result["warnings"] = warnings_about(result)
    return result


def write_result(result: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(result, indent=1) + "\n")


def read_result(file: Path) -> dict[str, Any]:
    """Raises ValueError if the file is not a result."""
    try:
        result = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT or "requests" not in result:
        raise ValueError(f"{file} is not what `tandem bench --out` writes")
    return result


def write_records(records: Sequence[RequestRecord], file: Path) -> None:
    """Write a JSON line per request, by time of sending. Raises OSError."""
    with file.open("w") as lines:
        for record in sorted(records, key=lambda one: one.sent_s):
            lines.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")


def _config_json(config: BenchConfig) -> dict[str, Any]:
    """Return the configuration without secrets."""
    described = asdict(config)
    endpoint = described["endpoint"]
    endpoint["api_key"] = "(set)" if endpoint["api_key"] else ""
    endpoint["headers"] = [name for name, _ in endpoint["headers"]]
    trace = described["workload"]["trace"]
    described["workload"]["trace"] = None if trace is None else str(trace)
    described["slo"] = None if config.slo is None else dict(config.slo.limits)
    return described


def _gaps_over_time(records: Sequence[RequestRecord]) -> dict[str, Any] | None:
    """Bucket gaps by the time at which they end."""
    gaps = sorted((after, after - before) for record in records for before, after in pairwise(record.times))
    if not gaps:
        return None
    begin, end = gaps[0][0], gaps[-1][0]
    width = max((end - begin) / NUM_BUCKETS, 1e-3)
    buckets: dict[int, list[float]] = {}
    for moment, gap in gaps:
        buckets.setdefault(int((moment - begin) / width), []).append(gap)
    rows = [(begin + (number + 0.5) * width, sorted(values)) for number, values in sorted(buckets.items())]
    return {
        "bucket_s": width,
        "at_s": [round(moment, 4) for moment, _ in rows],
        "count": [len(values) for _, values in rows],
        "p50": [percentile(values, 50) for _, values in rows],
        "p99": [percentile(values, 99) for _, values in rows],
        "max": [values[-1] for _, values in rows],
    }
