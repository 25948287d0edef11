"""Arrivals: a trace's requests at a rate that follows a curve."""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.elastic.clients import Arrival
from benchmarks.elastic.pages import PAGE_SIZE
from tandem.bench.workloads.azure import Azure
from tandem.bench.workloads.base import Session, Workload
from tandem.bench.workloads.mooncake import Mooncake
from tandem.bench.workloads.prompts import PromptMaker
from tandem.prefix import prefix_identities

# A curve of (seconds, value) points, straight between them.
Curve = Sequence[tuple[float, float]]
DAY_S = 86_400.0
# Assumed daily curve: share of the peak's rate at each hour. The trough is at 4, the peak at 15.
NIGHT, SHARPNESS, PEAK_HOUR = 0.15, 1.3, 15.0
# Points of the curve in an hour.
POINTS_PER_HOUR = 4
# Makes other prefixes of those of a trace: its multiples are far apart.
SALT = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def made_up(number: int, seed: int = 0) -> list[Arrival]:
    """Returns requests with the mean lengths of Azure's conversations, without a trace file."""
    chance = random.Random(f"{seed}/lengths")

    def length(mean: float, sigma: float, most: int) -> int:
        return min(most, max(1, round(chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    return [Arrival(0.0, length(1155, 1.0, 14_000), length(211, 0.8, 1000)) for _ in range(number)]


def read_trace(file: Path, limit: int | None = None) -> tuple[list[Arrival], bool]:
    """Returns a trace's requests, and whether they share prefixes. A .csv is of Azure, a .jsonl of Mooncake.

    Raises ValueError if it cannot be read.
    """
    make = PromptMaker(0, "ids", 100_000)
    if file.suffix == ".csv":
        return [_arrival(session, shares=False) for session in Azure(make, file, limit=limit).sessions()], False
    workload: Workload = Mooncake(make, file, limit=limit)
    return [_arrival(session, shares=True) for session in workload.sessions()], True


def _arrival(session: Session, *, shares: bool) -> Arrival:
    turn = session.turns[0]
    num_tokens = sum(part.num_tokens for part in turn.parts)
    blocks: tuple[int, ...] = ()
    if shares:
        ids = [token for part in turn.parts for token in part.token_ids or ()]
        blocks = tuple(prefix_identities(ids, PAGE_SIZE, ""))
    return Arrival(session.due_s or 0.0, num_tokens, turn.num_output_tokens, blocks)


def poisson(requests: Sequence[Arrival], rate: Curve, seed: int) -> Iterator[Arrival]:
    """Yields Poisson arrivals with lengths drawn from the trace. Args: rate: requests/s."""
    chance = random.Random(f"{seed}/poisson")
    value = interpolated(rate)
    highest, moment = max(point[1] for point in rate), 0.0
    while True:
        moment += chance.expovariate(highest)
        if moment > rate[-1][0]:
            return
        if chance.random() * highest < value(moment):
            yield chance.choice(requests)._replace(at=moment)


def replayed(requests: Sequence[Arrival], speed: Curve) -> Iterator[Arrival]:
    """Yields the trace's own arrivals, over and over, faster or slower by a curve. Each repetition has prefixes of its
    own."""
    length_s = requests[-1].at * (1 + 1 / len(requests))
    number = place = 0
    passed = 0.0
    for (begin, first), (end, last) in pairwise(speed):
        # Trace time passes evenly between two points.
        even = (first + last) / 2
        salt = number * SALT
        while (moment := number * length_s + requests[place].at) < passed + even * (end - begin):
            request = requests[place]
            blocks = tuple((block + salt) & MASK for block in request.blocks)
            yield request._replace(at=begin + (moment - passed) / even, blocks=blocks)
            place += 1
            if place == len(requests):
                number, place = number + 1, 0
                salt = number * SALT
        passed += even * (end - begin)


def interpolated(curve: Curve) -> Callable[[float], float]:
    moments = [moment for moment, _ in curve]

    def value(moment: float) -> float:
        after = min(len(curve) - 1, max(1, bisect_right(moments, moment)))
        (begin, first), (end, last) = curve[after - 1], curve[after]
        share = min(1.0, max(0.0, (moment - begin) / (end - begin)))
        return first + share * (last - first)

    return value


def daily(peak: float, hours: float = 24.0) -> Curve:
    """Returns the assumed daily curve.

    Args:
        peak: its highest value.
        hours: length of the day: a short one is steeper.
    """
    points = []
    count = round(24 * POINTS_PER_HOUR)
    for number in range(count + 1):
        hour = 24.0 * number / count
        wave = (1 + math.cos(2 * math.pi * (hour - PEAK_HOUR) / 24)) / 2
        points.append((hour * 3600.0 * hours / 24, peak * (NIGHT + (1 - NIGHT) * wave**SHARPNESS)))
    return points


def steps(first: float, *parts: tuple[float, float]) -> Curve:
    """Returns a curve of (seconds, value at their end) parts."""
    points = [(0.0, first)]
    for seconds, value in parts:
        points.append((points[-1][0] + seconds, value))
    return points
