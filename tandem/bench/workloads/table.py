"""Makes a configuration's sessions and their arrival times."""

from dataclasses import replace
from itertools import islice, takewhile

from tandem.bench.arrivals import ArrivalConfig, arrival_times
from tandem.bench.config import TRACES, WorkloadConfig
from tandem.bench.workloads.azure import Azure
from tandem.bench.workloads.base import Session, Workload
from tandem.bench.workloads.mooncake import Mooncake
from tandem.bench.workloads.prompts import PromptMaker
from tandem.bench.workloads.steady_streams import SteadyStreams
from tandem.bench.workloads.synthetic import Synthetic

DEFAULT_NUM_REQUESTS = 100
# All prompts are made before a run: too high a rate would delay its start forever.
MAX_REQUESTS = 1_000_000


def make_sessions(
    config: WorkloadConfig, arrivals: ArrivalConfig | None, duration_s: float | None = None
) -> list[Session]:
    """Args: arrivals: None: those of the trace; duration_s: later arrivals are left out.

    Raises ValueError if the trace cannot be used, or too many sessions would arrive.
    """
    make = PromptMaker(config.seed, config.prompt_as, config.vocab_size)
    lead_s = config.lead_s if config.kind == "steady-streams" else 0.0
    if arrivals is not None and duration_s is not None and config.num_requests is None and config.kind not in TRACES:
        times = arrival_times(arrivals, config.seed)
        within = takewhile(lambda moment: (moment or 0.0) + lead_s < duration_s, times)
        num_arriving = sum(1 for _ in islice(within, MAX_REQUESTS + 1))
        if num_arriving > MAX_REQUESTS:
            raise ValueError(f"more than {MAX_REQUESTS:,} requests would arrive: say how many are enough (--requests)")
        config = replace(config, num_requests=max(1, num_arriving))
    sessions = _workload(config, make).sessions()
    if arrivals is not None:
        for session, moment in zip(sessions, arrival_times(arrivals, config.seed), strict=False):
            session.due_s = None if moment is None else moment + lead_s
    if config.kind == "steady-streams":
        return SteadyStreams(
            make,
            sessions,
            config.num_streams,
            config.stream_input_tokens,
            config.stream_output_tokens,
            are_spread=config.spread_streams,
        ).sessions()
    return sessions


def _workload(config: WorkloadConfig, make: PromptMaker) -> Workload:
    if config.kind == "mooncake" and config.trace is not None:
        return Mooncake(make, config.trace, config.time_scale, config.num_requests)
    if config.kind == "azure" and config.trace is not None:
        return Azure(make, config.trace, config.time_scale, config.num_requests)
    return Synthetic(
        make,
        config.seed,
        config.num_requests or DEFAULT_NUM_REQUESTS,
        config.input_lengths,
        config.output_lengths,
        num_system_tokens=config.num_system_tokens,
        num_document_tokens=config.num_document_tokens,
        num_turns=config.num_turns if config.kind == "multi-turn" else 1,
        think_s=config.think_s,
    )
