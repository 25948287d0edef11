"""Gaps of running streams while prompts beside them are loaded from the store, against the same prompts in the pool."""

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.page_store.serving import Cluster
from benchmarks.page_store.sizes import Sizes
from benchmarks.rows import Row
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.measures import summarize, summarize_within
from tandem.bench.processes import run_processes
from tandem.bench.runner import RunnerConfig
from tandem.bench.workloads.base import PromptPart, Session, Turn
from tandem.bench.workloads.prompts import PromptMaker
from tandem.bench.workloads.steady_streams import SteadyStreams

_STREAM_INPUT_TOKENS = 64
_OUTPUT_TOKENS = 4
_LEAD_S = 3.0
_TIMEOUT_S = 120.0
MAX_RATIO = 1.1


def measure_streams(cluster: Cluster, sizes: Sizes, vocab_size: int) -> dict[str, float]:
    """Return the streams' ITL in milliseconds, and the prompts' tokens per second from the store and the pool.

    Raises EndpointError, RuntimeError, TandemError.
    """
    make = PromptMaker(0, "ids", vocab_size)
    documents = [make.part("user", sizes.prefix_tokens, f"document/{number}") for number in range(sizes.num_documents)]
    for document in documents:
        cluster.ask(document.token_ids or ())
    cluster.warm_up(_STREAM_INPUT_TOKENS)
    sessions = SteadyStreams(
        make,
        _arriving(make, documents, sizes),
        sizes.num_streams,
        _STREAM_INPUT_TOKENS,
        sizes.stream_tokens,
        are_spread=True,
    ).sessions()
    endpoint = EndpointConfig(f"grpc://{cluster.served.address}", timeout_s=_TIMEOUT_S)
    run = run_processes(endpoint, RunnerConfig(), sessions, num_processes=1)
    requests: Any = summarize([record for record in run.records if record.group == "requests"])
    streams: Any = summarize_within(
        [record for record in run.records if record.group == "streams"],
        requests["begin_s"],
        requests["begin_s"] + requests["duration_s"],
    )
    if streams["itl"] is None or requests["num_whole"] < requests["num_requests"]:
        raise RuntimeError(f"streams or prompts failed: {requests['errors']} {streams['errors']}")
    found = {name: streams["itl"][name] * 1e3 for name in ("p50", "p99")}
    num_loaded = sum(requests["num_loaded_tokens"].values())
    found["loaded"] = num_loaded / requests["duration_s"]
    found["pool"] = ((requests["num_cached_tokens"] or 0) - num_loaded) / requests["duration_s"]
    return found


def compare(idle: dict[str, float], busy: dict[str, float]) -> list[Row]:
    """Args: idle: with all prompts in the pool; busy: with prompts in the store."""
    return [
        Row("ITL p50, prompts in the pool", idle["p50"], "ms"),
        Row("ITL p50, prompts in the store", busy["p50"], "ms"),
        Row("ITL p99, prompts in the pool", idle["p99"], "ms"),
        Row("ITL p99, prompts in the store", busy["p99"], "ms"),
        Row("  ratio of p99", busy["p99"] / idle["p99"], "", high=MAX_RATIO),
        Row("  loaded from the store", busy["loaded"], "tokens/s"),
        Row("  found in the pool instead", busy["pool"], "tokens/s"),
    ]


def _arriving(make: PromptMaker, documents: Sequence[PromptPart], sizes: Sizes) -> list[Session]:
    """Documents take turns, so that a small pool never holds the next one."""
    rng = random.Random(0)
    sessions: list[Session] = []
    moment = 0.0
    while (moment := moment + rng.expovariate(sizes.rate)) < sizes.seconds:
        index = len(sessions)
        question = make.part("user", sizes.question_tokens, f"question/{index}")
        turn = Turn((documents[index % len(documents)], question), _OUTPUT_TOKENS)
        sessions.append(Session(index, (turn,), due_s=_LEAD_S + moment))
    return sessions
