"""Reads a trace for `tandem estimate`, and prints the bounds of a cluster for it."""

import argparse
from dataclasses import asdict
from typing import Any

from tandem.bench.config import WorkloadConfig
from tandem.bench.workloads.azure import Azure
from tandem.bench.workloads.base import PromptPart, Role
from tandem.bench.workloads.mooncake import Mooncake
from tandem.bench.workloads.prompts import PromptMaker
from tandem.deploy.estimate.bounds import MAX_START_S, Arrival, TraceNeeds, needs_of
from tandem.deploy.estimate.rates import Load
from tandem.deploy.estimate.worker import Worker

_READERS = {"azure": Azure, "mooncake": Mooncake}


class _Lengths(PromptMaker):
    """Makes parts without tokens."""

    def part(self, role: Role, num_tokens: int, key: str) -> PromptPart:
        del key
        return PromptPart(role, num_tokens)


def read_trace(arguments: argparse.Namespace) -> list[Arrival]:
    """Returns the trace's requests by arrival, the first at 0.

    Raises ValueError: the trace is missing or unreadable, or options contradict it.
    """
    config = WorkloadConfig(arguments.workload, trace=arguments.trace, time_scale=arguments.time_scale)
    if arguments.gpus or arguments.rate:
        raise ValueError("a trace has its own rates: leave out --gpus and --rate")
    if (arguments.prefill_tp or arguments.tp) != (arguments.decode_tp or arguments.tp):
        raise ValueError("bounds are those of --workers, which are all alike: give --tp")
    if arguments.start_time > MAX_START_S:
        raise ValueError(f"--start-time must be at most {MAX_START_S / 60:g}m")
    assert config.trace is not None
    sessions = _READERS[config.kind](_Lengths(0, "ids"), config.trace, config.time_scale).sessions()
    return [
        Arrival(session.due_s or 0.0, sum(part.num_tokens for part in turn.parts), turn.num_output_tokens)
        for session in sessions
        for turn in session.turns
    ]


def estimate_bounds(worker: Worker, load: Load, arrivals: list[Arrival], start_s: float) -> dict[str, Any]:
    """Returns the bounds of `--workers`, beside the cheapest fixed number. Raises ValueError as `needs_of`."""
    needs = needs_of(worker, load, arrivals)
    gpus_per_worker = worker.degree / worker.workers_per_gpu
    found: dict[str, Any] = {}
    for name, sizing in (("workers", needs.cheapest(start_s)), ("fixed", needs.fixed())):
        found[name] = asdict(sizing) | {"gpu_hours": sizing.worker_s * gpus_per_worker / 3600}
    return _described(needs) | found


def _described(needs: TraceNeeds) -> dict[str, Any]:
    return {
        "requests": sum(needs.counts),
        "windows": len(needs.counts),
        "mean_rate": sum(needs.demands) / len(needs.demands),
        "highest_rate": max(needs.demands),
        "least_workers": min(needs.needs),
        "most_workers": max(needs.needs),
    }


def print_bounds(found: dict[str, Any], load: Load) -> None:
    elastic, fixed = found["workers"], found["fixed"]
    print(
        f"\ntrace: {found['requests']:,} requests in {found['windows']:,} minutes: {found['mean_rate']:.2f} a second, "
        f"up to {found['highest_rate']:.2f} in a minute, in mean requests ({load.prompt_len:,}/{load.output_len:,})\n"
        f"  each minute needs {found['least_workers']} to {found['most_workers']} workers\n"
        f"--workers {elastic['low']}:{elastic['high']} takes {elastic['gpu_hours']:.1f} GPU hours and serves "
        f"{elastic['served_share']:.1%} within the limits\n"
        f"--workers {fixed['low']}, the fewest fixed, takes {fixed['gpu_hours']:.1f} GPU hours and serves "
        f"{fixed['served_share']:.1%}"
    )
