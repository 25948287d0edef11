"""Fifty prompts at once, beside streams that are running."""

from typing import Any

from benchmarks.lab.runs import gaps_before, phase_means, run_load, slim
from benchmarks.lab.sizes import Sizes
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.config import WorkloadConfig
from tandem.bench.workloads.synthetic import Lengths


def measure_burst(address: str, label: str, sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    """`result` of tandem bench, its streams' gaps before the burst (`quiet_itl`) and the prompts' `phases_ms`.

    Raises as `run_load`.
    """
    warm_up(address, sizes, vocab_size)
    workload = WorkloadConfig(
        "steady-streams",
        num_requests=sizes.num_burst,
        input_lengths=Lengths(sizes.burst_input, sizes.burst_input),
        output_lengths=Lengths(sizes.burst_output, sizes.burst_output),
        num_streams=sizes.num_streams,
        stream_input_tokens=sizes.stream_input,
        stream_output_tokens=sizes.stream_output,
        lead_s=sizes.lead_s,
        vocab_size=vocab_size,
    )
    arrivals = ArrivalConfig("burst", rate=sizes.num_burst, burst_size=sizes.num_burst)
    result, records = run_load(address, workload, arrivals, label, sizes.run_timeout_s)
    return {
        "result": slim(result, keep=("series", "ttft")),
        "quiet_itl": gaps_before(records, result["requests"]["begin_s"]),
        "phases_ms": phase_means(records),
    }


def warm_up(address: str, sizes: Sizes, vocab_size: int) -> None:
    """A few prompts that none of the experiments has, all at once. Raises as `run_load`."""
    workload = WorkloadConfig(
        num_requests=sizes.num_warmup,
        input_lengths=Lengths(sizes.burst_input, sizes.burst_input),
        output_lengths=Lengths(sizes.burst_output, sizes.burst_output),
        vocab_size=vocab_size,
        seed=99,
    )
    run_load(address, workload, ArrivalConfig(concurrency=sizes.num_warmup), "warming up", sizes.run_timeout_s)
