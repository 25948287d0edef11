"""Replays loads on a cluster in virtual time whose number of workers follows them, beside other rules.

The router, its policy and the planners are the real ones; workers are simulated (docs/benchmarks.md). Aims are those
of the planner against the oracle, which knows the arrivals beforehand.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.elastic.clients import Arrival
from benchmarks.elastic.fleet import Setup, SizerMaker
from benchmarks.elastic.load import made_up, poisson, read_trace, replayed
from benchmarks.elastic.oracle import Windows, find_oracle
from benchmarks.elastic.outcome import Limits
from benchmarks.elastic.picture import draw
from benchmarks.elastic.planned import Planned
from benchmarks.elastic.replay import Replay, replay
from benchmarks.elastic.scenarios import SCENARIOS, Scenario
from benchmarks.elastic.sizers import Fixed, ThresholdRule
from benchmarks.elastic.step_times import StepTimes, worker_of
from benchmarks.elastic.work import worker_rate
from tandem.deploy.estimate.gpus import GPUS
from tandem.deploy.supervise.size_planner import Bounds

KIND = "any"
RULES = ("planner", "oracle", "threshold", "fixed")
NUM_MADE_UP = 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """One replay of one scenario. Attributes: cpu_s: for the oracle, of all rounds."""

    scenario: Scenario
    rule: str
    replay: Replay
    cpu_s: float

    def json(self) -> dict[str, Any]:
        result = self.replay
        return {
            "scenario": self.scenario.name,
            "rule": self.rule,
            "requests": len(result.requests),
            "good_share": round(result.share, 4),
            "good_in": {name: result.num_good(begin, end) for name, begin, end in self.scenario.windows},
            "gpu_hours": round(result.gpu_hours, 3),
            "changes": len(result.usage.changes),
            "changes_per_hour": round(3600 * len(result.usage.changes) / self.scenario.length_s, 2),
            "ttft_p99_s": round(result.ttft_p99(), 3),
            "failed": result.num_failed,
            "deaths": result.usage.num_deaths,
            "restarted": result.num_restarted,
            "cpu_s": round(self.cpu_s, 1),
            "counts": [(round(moment), have, wanted) for moment, have, wanted in result.usage.counts],
        }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    # Losses of workers are part of the scenario.
    logging.disable(logging.WARNING)
    try:
        requests, shares = read_trace(arguments.trace) if arguments.trace else (made_up(NUM_MADE_UP), False)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    times = StepTimes(worker_of(GPUS[arguments.gpu]))
    limits = Limits(arguments.ttft / 1e3, arguments.itl / 1e3)
    setup = Setup({}, limits, arguments.start, arguments.routers, shares_prefixes=shares, seed=arguments.seed)
    rows: list[Row] = []
    for name in arguments.scenarios:
        scenario = SCENARIOS[name](arguments.hours)
        for row in run(scenario, arguments.rules, requests, times, setup):
            rows.append(row)
            print(f"{name}, {row.rule}: {row.cpu_s:.0f} CPU s", file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps([one.json() for one in rows], indent=1) + "\n")
    Console(width=150).print(table_of(rows))
    if arguments.picture:
        draw([row.json() for row in rows], arguments.picture)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="Azure's .csv or Mooncake's .jsonl; without it, made-up lengths"
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200")
    parser.add_argument("--ttft", type=float, default=500.0, metavar="MS", help="objective (%(default)s)")
    parser.add_argument("--itl", type=float, default=25.0, metavar="MS", help="objective (%(default)s)")
    parser.add_argument("--start", type=float, default=40.0, metavar="SECONDS", help="of a worker (%(default)s)")
    parser.add_argument("--hours", type=float, default=24.0, help="of the long scenarios (%(default)s)")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the workers over time; needs matplotlib")
    return parser.parse_args(argv)


def run(
    scenario: Scenario, rules: Sequence[str], requests: Sequence[Arrival], times: StepTimes, setup: Setup
) -> Iterator[Row]:
    arrivals = arrivals_of(scenario, requests, times, setup)
    setup = replace(
        setup,
        counts={KIND: scenario.first},
        deaths_per_hour=scenario.deaths_per_hour,
        turn_s=scenario.turn_s,
    )
    for rule in rules:
        if rule == "oracle":
            windows = Windows(KIND, scenario.window_s, scenario.low, scenario.high)
            found = find_oracle(arrivals, times, setup, scenario.length_s, windows)
            yield Row(scenario, rule, found.replay, found.cpu_s)
            continue
        for label, make_sizer, first in sizers_of(rule, scenario, setup.limits):
            own = replace(setup, counts={KIND: first})
            result = replay(arrivals, times, own, make_sizer, scenario.length_s)
            yield Row(scenario, label, result, result.cpu_s)


def arrivals_of(scenario: Scenario, requests: Sequence[Arrival], times: StepTimes, setup: Setup) -> list[Arrival]:
    rate = worker_rate(requests, times)
    if scenario.plays:
        own_rate = len(requests) / requests[-1].at
        return list(replayed(requests, [(moment, load * rate / own_rate) for moment, load in scenario.load]))
    return list(poisson(requests, [(moment, load * rate) for moment, load in scenario.load], setup.seed))


def sizers_of(rule: str, scenario: Scenario, limits: Limits) -> list[tuple[str, SizerMaker, int]]:
    """Returns the label, sizer and first number of workers of each replay."""
    low, high = scenario.low, scenario.high
    if rule == "planner":
        bounds = {KIND: Bounds(low, high)}
        return [(f"planner, {low}:{high}", lambda clock: Planned(bounds, limits, clock), scenario.first)]
    if rule == "threshold":
        least = max(1, low)
        return [(rule, lambda _: ThresholdRule(KIND, least, high), max(least, scenario.first))]

    def fixed(count: int) -> SizerMaker:
        return lambda _: Fixed({KIND: count})

    return [(f"{count} fixed", fixed(count), count) for count in scenario.fixed]


def table_of(rows: Sequence[Row]) -> Table:
    """Returns all replays. Shares of the oracle's good requests and GPU hours are of the same scenario."""
    table = Table("scenario", "rule", title="Sizes that follow the load")
    for column in (
        "good",
        "of oracle",
        "after swings",
        "GPU h",
        "of oracle",
        "changes/h",
        "p99 TTFT",
        "failed",
        "CPU s",
    ):
        table.add_column(column, justify="right")
    oracles = {row.scenario.name: row.replay for row in rows if row.rule == "oracle"}
    for row in rows:
        result, oracle = row.replay, oracles.get(row.scenario.name)
        good = cost = after = ""
        if oracle is not None:
            good = f"{result.num_good() / max(1, oracle.num_good()):.3f}"
            cost = f"{result.gpu_s / oracle.gpu_s:.2f}"
            both = [
                (result.num_good(begin, end), oracle.num_good(begin, end)) for _, begin, end in row.scenario.windows
            ]
            after = ", ".join(f"{own / max(1, best):.2f}" for own, best in both)
        table.add_row(
            row.scenario.name,
            row.rule,
            f"{result.share:.3f}",
            good,
            after,
            f"{result.gpu_hours:.2f}",
            cost,
            f"{3600 * len(result.usage.changes) / row.scenario.length_s:.1f}",
            f"{result.ttft_p99():.2f} s",
            str(result.num_failed),
            f"{row.cpu_s:.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
