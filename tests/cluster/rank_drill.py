"""Requests and faults for clusters whose workers have several ranks."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.processes import ProcessId
from tests.cluster.conftest import CHUNK_SIZE, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream, QuickConfig, thaw, wait_whole

PAGE_SIZE = 16
MAX_TOKENS = 24
NUM_STREAMS = 6


def config_for(base: ClusterConfig, **settings: Any) -> ClusterConfig:
    of_all: dict[str, Any] = {
        "model": base.model,
        "dtype": "float32",
        "num_pages": 160,
        "chunk_size": CHUNK_SIZE,
        "num_threads": 1,
        "grpc_port": 0,
        "http_port": 0,
    }
    return QuickConfig(**(of_all | settings))


def serve_turns(served: ServedCluster, oracle: Oracle, page_size: int) -> None:
    """Sends prompts of several chunks at once, then one behind a cached prefix, and checks all tokens."""
    rng = random.Random(4)
    stem = random_ids(rng, 6 * PAGE_SIZE + 5)
    prompts = [stem, random_ids(rng, 1), random_ids(rng, 17), random_ids(rng, 150), stem + random_ids(rng, 40)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=MAX_TOKENS), prompts))
    prompts.append(stem + random_ids(rng, 9))
    prompts.append(prompts[3] + answers[3].token_ids + random_ids(rng, 7))
    # Outputs that end with their first token have no decode worker.
    answers += [served.complete(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in prompts[-2:]]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.token_ids == oracle.generate(prompt, MAX_TOKENS, ignore_eos=number >= len(prompts) - 2)
    handover = answers[-2].last.handover
    cached = len(stem) // page_size * page_size
    assert handover.prefill_cached_tokens >= cached and handover.decode_cached_tokens >= cached
    served.wait_clean()


def strike_and_finish(
    served: ServedCluster, oracle: Oracle, victim: str, signum: signal.Signals, *, hits_follower: bool
) -> None:
    """Signals a rank while streams run. Every stream gets its tokens; a killed worker is replaced as a whole."""
    wait_whole(served)
    worker = served.worker(victim)
    assert worker is not None
    rng = random.Random(f"{victim} {signum} {hits_follower}")
    streams = [
        LiveStream(served, random_ids(rng, rng.randint(20, 300)), max_tokens=rng.randint(40, 120), ignore_eos=True)
        for _ in range(NUM_STREAMS)
    ]
    streams[0].wait_tokens(2 if victim.startswith("prefill") else 20)
    ranks = [ProcessId.of(pid) for pid in (worker.pid, *worker.follower_pids)]
    struck = ranks[-1 if hits_follower else 0].pid
    os.kill(struck, signum)
    if signum is signal.SIGSTOP:
        reason = f"no {victim.partition('-')[0]} worker is connected"
        wait_until(lambda: served.client.server_info().not_ready_reason == reason, 10.0, "the router knows")
        thaw([struck])
    else:
        wait_until(lambda: not any(rank.is_alive() for rank in ranks), 10.0, "all ranks have ended")
    wait_whole(served)
    for stream in streams:
        answer = stream.finish()
        assert len(answer.token_ids) == stream.sampling["max_tokens"]
        assert oracle.confirms(stream.prompt_ids, answer.token_ids)
    again = served.worker(victim)
    assert again is not None and (again.pid == worker.pid) == (signum is signal.SIGSTOP)
    served.wait_clean()
