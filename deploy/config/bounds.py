"""Bounds of the number of processes of one kind: `1:8`. Imports no torch: the command line reads this too."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.config import WORKER_KINDS, WorkerKind, require

# Processes whose number may follow the load.
SizedKind = WorkerKind | Literal["router"]
SIZED_KINDS: tuple[SizedKind, ...] = (*WORKER_KINDS, "router")
# Field of ClusterConfig with the number that a cluster starts with.
COUNT_FIELDS: Mapping[SizedKind, str] = {
    "prefill": "num_prefill",
    "decode": "num_decode",
    "both": "num_both",
    "any": "num_any",
    "router": "num_routers",
}


def in_fields(counts: Mapping[SizedKind, int] | Mapping[WorkerKind, int]) -> dict[str, Any]:
    """Returns the numbers by field of ClusterConfig."""
    return {COUNT_FIELDS[kind]: count for kind, count in counts.items()}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest number of processes of one kind. Raises ValueError on construction."""

    low: int
    high: int

    def __post_init__(self) -> None:
        require(0 <= self.low <= self.high, f"{self} is no range: write LOW:HIGH, such as 1:8")

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"

    @property
    def is_fixed(self) -> bool:
        return self.low == self.high

    def clamp(self, count: int) -> int:
        return min(self.high, max(self.low, count))


def has_zero(bounds: Mapping[SizedKind, Bounds]) -> bool:
    """Returns whether a cluster may have no worker of a kind until a request waits for one."""
    return any(one.low == 0 for one in bounds.values())


def parse_count(text: str) -> int | Bounds:
    """Parses `3` or `1:8`; equal bounds are a plain number. Raises ValueError."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if (found := re.fullmatch(r"(\d+):(\d+)", text)) is None:
        raise ValueError(f"must be a whole number, or a range such as 1:8, not {text!r}")
    bounds = Bounds(*map(int, found.groups()))
    return bounds.low if bounds.is_fixed else bounds


def parse_counts(texts: Mapping[SizedKind, str]) -> dict[SizedKind, int | Bounds]:
    """Raises ValueError."""
    return {kind: parse_count(text) for kind, text in texts.items()}


def count_argument(text: str) -> int | Bounds:
    """As parse_count, for argparse."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
