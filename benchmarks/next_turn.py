"""Where the next turn of a conversation is served: what is computed and shipped for it, turn by turn.

A cluster of four workers that all do both, in the model that `python -m benchmarks.placement_model` runs: time is
virtual, workers take for their forwards what an H200 takes with a model of 8 billion parameters, and what chooses among
them is the router's own code. Conversations have a beginning in common, each turn adds to all that was said before, and
the next one comes some time after the answer. The same conversations are served twice: where `--placement auto` has
each turn, and with two workers for each (`disaggregated`). For each turn the table has, in the mean, the tokens of its
prompt, those that were not cached where it was computed, the pages of 16 tokens that went to another worker, and the
share of requests that two workers served.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cluster_model.cluster import WORKERS, ModelCluster
from benchmarks.cluster_model.workloads import WORKLOADS, Stretch, Workload, conversations
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.placement import AUTO, DISAGGREGATED

MULTI_TURN = next(workload for workload in WORKLOADS if workload.name == "multi-turn")


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """What the same turn of all conversations took, in the mean.

    Attributes:
        prompt_tokens: of the whole conversation so far.
        computed_tokens: those of them that were not cached where they were computed.
        shipped_pages: that went to another worker.
        apart: share of them that two workers served.
        ttft_p50_ms: of these.
    """

    turn: int
    prompt_tokens: int
    computed_tokens: float
    shipped_pages: float
    apart: float
    ttft_p50_ms: float


def serve(workload: Workload, placement: str, rate: float, seconds: float, seed: int) -> list[ServedTurn]:
    """Args: rate: requests a second; seconds: for so long conversations begin."""
    cluster = ModelCluster(replace(WORKERS, placement=placement), Objectives(), seed=seed)
    cluster.run(list(conversations([Stretch(workload, 0.0, seconds, rate)], seed)))
    due_s = {record.index: record.due_s for record in cluster.records}
    turns = []
    for turn in range(workload.num_turns):
        length = workload.num_system + turn * (workload.num_input + workload.num_output) + workload.num_input
        jobs = [job for job in cluster.jobs if job.num_prompt == length]
        turns.append(
            ServedTurn(
                turn + 1,
                length,
                statistics.fmean(length - job.found_cached for job in jobs),
                statistics.fmean(job.num_pages_shipped for job in jobs),
                statistics.fmean(not job.continues_here for job in jobs),
                1e3 * statistics.median(job.first_token_at - due_s[job.number] for job in jobs),
            )
        )
    return turns


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[20, 50], help="requests a second (%(default)s)")
    parser.add_argument("--turns", type=int, default=6, help="of a conversation (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="for so long conversations begin (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args(argv)
    workload = replace(MULTI_TURN, num_turns=arguments.turns)
    found = []
    for rate in arguments.rates:
        table = Table(title=f"{rate:g} requests a second, --workers {len(WORKERS.roles)}")
        for name in ("turn", "prompt", "placement", "computed", "shipped", "by two", "TTFT p50"):
            table.add_column(name, justify="left" if name == "placement" else "right", no_wrap=True)
        served = {
            placement: serve(workload, placement, rate, arguments.seconds, arguments.seed)
            for placement in (AUTO, DISAGGREGATED)
        }
        for both in zip(*served.values(), strict=True):
            for placement, turn in zip(served, both, strict=True):
                found.append({"rate": rate, "placement": placement, **asdict(turn)})
                table.add_row(
                    str(turn.turn),
                    f"{turn.prompt_tokens:,}",
                    placement,
                    f"{turn.computed_tokens:,.0f}",
                    f"{turn.shipped_pages:,.1f}",
                    f"{turn.apart:.0%}",
                    f"{turn.ttft_p50_ms:.0f} ms",
                )
        Console().print(table)
        sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
