"""One request at a time, and eight."""

from typing import Any

from benchmarks.lab.runs import phase_means, run_load, slim
from benchmarks.lab.sizes import Sizes
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.config import WorkloadConfig
from tandem.bench.workloads.synthetic import Lengths

MANY = 8


def measure_concurrency(address: str, label: str, sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    """`result` of tandem bench and `phases_ms`, by how many requests were in hand. Raises as `run_load`."""
    measured = {}
    for concurrency, num_requests in ((1, sizes.num_alone), (MANY, sizes.num_beside)):
        workload = WorkloadConfig(
            num_requests=num_requests,
            input_lengths=Lengths(sizes.request_input, sizes.request_input),
            output_lengths=Lengths(sizes.request_output, sizes.request_output),
            vocab_size=vocab_size,
            seed=concurrency,
        )
        arrivals = ArrivalConfig(concurrency=concurrency)
        result, records = run_load(
            address, workload, arrivals, f"{label}, {concurrency} at a time", sizes.run_timeout_s
        )
        measured[str(concurrency)] = {"result": slim(result), "phases_ms": phase_means(records)}
    return measured
