"""Counts requests that meet an SLO."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.bench.measures import RequestMeasures, percentile
from tandem.bench.records import RequestRecord

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m)")
_ITL_PERCENTILE = re.compile(r"itl_p(\d{1,2}(?:\.\d+)?)")
_NAMES = ("ttft", "ttft_from_sent", "tpot", "itl_max", "itl_mean", "e2e")


def parse_duration(text: str) -> float:
    """Parse "25ms", "0.5s", "2m" or "100us" into seconds. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a duration is a number with its unit, such as 500ms or 2s, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds, by measure. All must hold."""

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse "ttft=500ms,itl_p95=25ms". Raises ValueError."""
        limits = {}
        for item in text.split(","):
            name, equals, value = item.strip().partition("=")
            if not equals or not (name in _NAMES or _ITL_PERCENTILE.fullmatch(name)):
                known = ", ".join((*_NAMES, "itl_pN"))
                raise ValueError(f"an SLO is NAME=DURATION, with the names {known}; not {item.strip()!r}")
            if name in limits:
                raise ValueError(f"the SLO names {name} twice")
            limits[name] = parse_duration(value)
        return cls(tuple(limits.items()))

    def missed(self, record: RequestRecord) -> list[str]:
        """Return the names of missed limits; requests without gaps meet every limit on gaps.

        A request with an error is not good, whatever this returns.
        """
        measures = RequestMeasures.of(record)
        return [name for name, limit in self.limits if _value(measures, name) > limit]

    def is_good(self, record: RequestRecord) -> bool:
        return not record.error and not self.missed(record)


def goodput(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> dict[str, Any]:
    """Count measured requests, except those cut by the run's end."""
    counted = [record for record in records if not record.is_warmup and record.error != "cut"]
    num_good = sum(slo.is_good(record) for record in counted)
    missed: dict[str, int] = {name: 0 for name, _ in slo.limits}
    for record in counted:
        if not record.error:
            for name in slo.missed(record):
                missed[name] += 1
    return {
        "slo": dict(slo.limits),
        "num_counted": len(counted),
        "num_good": num_good,
        "good_share": num_good / len(counted) if counted else 0.0,
        "good_requests_per_s": num_good / duration_s if duration_s > 0 else 0.0,
        "missed": missed,
    }


def _value(measures: RequestMeasures, name: str) -> float:
    """Return seconds; infinity for a missing required value."""
    if name == "itl_mean":
        return sum(measures.gaps) / len(measures.gaps) if measures.gaps else 0.0
    if name == "itl_max":
        return measures.itl_max or 0.0
    if found := _ITL_PERCENTILE.fullmatch(name):
        return percentile(sorted(measures.gaps), float(found[1])) if measures.gaps else 0.0
    value = getattr(measures, name)
    if value is None:
        # One token has no TPOT; no token at all has no TTFT.
        return 0.0 if name == "tpot" else float("inf")
    return float(value)
