"""The radix caches: prompts that nobody knows, that are known, that come at once, and that have been pushed out."""

import time
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.lab.concurrency import MANY
from benchmarks.lab.runs import answers, cached_share, phase_means, run_load, slim
from benchmarks.lab.sizes import PAGE_SIZE, Sizes
from benchmarks.served import Served
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.config import WorkloadConfig
from tandem.bench.records import RequestRecord
from tandem.bench.workloads.synthetic import Lengths
from tandem.client import TandemClient
from tandem.rpc.auth import cluster_metadata
from tandem.v1 import worker_pb2, worker_pb2_grpc

# What is in the pools afterwards, over what fits into them: all that was there before must go.
FILL = 1.5
IDLE_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 10.0
_POLL_S = 0.1
PROMPTS, SHARED, OWN, OTHERS = 11, 12, 13, 14


@dataclass(frozen=True, slots=True)
class Step:
    """Attributes: seed: the same seed has the same prompts; prefix: tokens that all of them begin with."""

    name: str
    seed: int
    num_requests: int
    concurrency: int = 1
    prefix: int = 0


def steps(sizes: Sizes) -> tuple[Step, ...]:
    """Of which `again` asks once more for what `others` has pushed out."""
    num_others = round(FILL * sizes.cache_pages * PAGE_SIZE / sizes.cached_input)
    return (
        Step("cold", PROMPTS, sizes.num_prompts),
        Step("warm", PROMPTS, sizes.num_prompts),
        Step("own", OWN, MANY, MANY),
        Step("shared", SHARED, MANY, MANY, sizes.cached_input - sizes.tail),
        Step("others", OTHERS, num_others, 2),
        Step("again", PROMPTS, sizes.num_prompts),
    )


def measure_cache(served: Served, sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    """`steps` by name, and what workers say of their pages after each (`accounts`). Raises as `run_load`, and
    TimeoutError if the workers are not idle after a step."""
    measured: dict[str, Any] = {}
    accounts = {"begin": wait_idle(served)}
    for step in steps(sizes):
        workload = WorkloadConfig(
            num_requests=step.num_requests,
            input_lengths=Lengths(sizes.cached_input - step.prefix, sizes.cached_input - step.prefix),
            output_lengths=Lengths(sizes.cached_output, sizes.cached_output),
            num_system_tokens=step.prefix,
            vocab_size=vocab_size,
            seed=step.seed,
        )
        arrivals = ArrivalConfig(concurrency=step.concurrency)
        result, records = run_load(served.address, workload, arrivals, step.name, sizes.run_timeout_s)
        measured[step.name] = _figures(result, records)
        accounts[step.name] = wait_idle(served)
    return {"steps": measured, "accounts": accounts, "num_pages": sizes.cache_pages}


def _figures(result: dict[str, Any], records: list[RequestRecord]) -> dict[str, Any]:
    return {
        "result": slim(result),
        "phases_ms": phase_means(records),
        "cached_share": cached_share(records),
        "answers": answers(records),
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in records),
    }


def wait_idle(served: Served) -> dict[str, dict[str, Any]]:
    """Each worker's account of its pages once nobody has any, with what is wrong with it ("": nothing).

    Raises:
        TimeoutError: somebody still has pages after IDLE_TIMEOUT_S.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        accounts = {}
        with TandemClient(served.address) as client:
            workers = client.server_info().workers
        for worker in workers:
            with grpc.insecure_channel(worker.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
                report = worker_pb2_grpc.WorkerAdminStub(channel).CheckIntegrity(
                    worker_pb2.CheckIntegrityRequest(),
                    timeout=_CALL_TIMEOUT_S,
                    metadata=cluster_metadata(served.cluster_token),
                )
            accounts[worker.worker_id] = _account(report)
        if not any(account["held"] for account in accounts.values()):
            return accounts
        if time.monotonic() > deadline:
            raise TimeoutError(f"workers hold pages for nobody: {accounts}")
        time.sleep(_POLL_S)


def _account(report: worker_pb2.IntegrityReport) -> dict[str, Any]:
    stats = report.stats
    return {
        "violation": report.violation,
        "total": stats.num_total_pages,
        "free": stats.num_free_pages,
        "cached": stats.num_cached_pages,
        "held": stats.num_locked_pages + stats.num_leased_pages,
        "prompt_tokens_computed": stats.prompt_tokens_computed,
        "pages_shipped": sum(shipped.num_pages for shipped in stats.shipped),
    }
