"""Several routers for the same workers; any router may die or hang."""

import json
import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import ray

from tandem.client import TandemClient, TandemError
from tests.cluster.conftest import VOCAB_SIZE, Oracle, ServedCluster, wait_until
from tests.cluster.event_client import EventClient, RefusedError
from tests.cluster.faults import LiveStream

ROUTERS = ("router-0", "router-1")
WORKERS = {"prefill-0", "decode-0", "decode-1"}
# Six requests of this length fit the pool.
NUM_TOKENS = 200
# For streams on the untouched router, while a restarting one takes a core.
MAX_GAP_S = 2.0


@pytest.fixture
def served(tiny_routers: ServedCluster) -> ServedCluster:
    return tiny_routers


@pytest.fixture
def clients(served: ServedCluster) -> Iterator[dict[str, TandemClient]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(TandemClient(served.cluster.routers[name].grpc, one_router=True))
            for name in ROUTERS
        }


def pid_of(served: ServedCluster, router: str) -> int:
    return ray.get(served.cluster.actor(router).__ray_call__.remote(lambda actor: os.getpid()))


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE - 50) for _ in range(count)]


def read(served: ServedCluster, router: str, path: str) -> str:
    address = served.cluster.routers[router].http
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        f"http://{address}{path}", timeout=5.0
    ) as answer:
        return answer.read().decode()


def num_restarts(served: ServedCluster, router: str) -> float:
    (line,) = re.findall(r"^tandem_process_restarts_total (.*)$", read(served, router, "/metrics"), re.MULTILINE)
    return float(line)


def is_ready(client: TandemClient) -> bool:
    try:
        return client.server_info(timeout_s=1.0).ready
    except TandemError:
        return False


def test_any_router_serves_any_request(
    served: ServedCluster, clients: dict[str, TandemClient], tiny_oracle: Oracle
) -> None:
    prompt = random_ids(random.Random(0), 90)
    streams = [LiveStream(served, prompt, client=client, max_tokens=40) for client in clients.values()]
    answers = [stream.finish() for stream in streams]
    assert [a.token_ids for a in answers] == [tiny_oracle.generate(prompt, 40)] * 2
    again = LiveStream(served, prompt, client=clients["router-1"], max_tokens=1).finish()
    assert again.last.usage.cached_tokens >= 80
    for client in clients.values():
        info = client.server_info()
        assert info.ready and {w.worker_id for w in info.workers} == WORKERS


def test_every_router_lists_all_routers(served: ServedCluster, clients: dict[str, TandemClient]) -> None:
    stream = LiveStream(served, [1, 2, 3], client=clients["router-0"], max_tokens=300, ignore_eos=True)
    wait_until(lambda: clients["router-1"].server_info().num_requests == 1, 5.0, "one hears of the other's request")
    for client in clients.values():
        routers = client.server_info().routers
        assert [(r.router_id, r.alive, r.grpc_address) for r in routers] == [
            (name, True, served.cluster.routers[name].grpc) for name in ROUTERS
        ]
    stream.finish()
    targets = json.loads(read(served, "router-0", "/sd"))
    found = {target["labels"]["process"]: target["targets"][0] for target in targets}
    assert found.keys() == {*ROUTERS, *WORKERS}
    assert {target["labels"]["model_name"] for target in targets} == {served.cluster.model_name}
    assert {name: found[name] for name in ROUTERS} == {name: served.cluster.routers[name].http for name in ROUTERS}


@pytest.mark.parametrize(
    "signum",
    [
        pytest.param(signal.SIGKILL, id="kill"),
        pytest.param(signal.SIGSTOP, id="stop", marks=pytest.mark.slow),
    ],
)
def test_dead_router_leaves_the_others_undisturbed(
    served: ServedCluster, clients: dict[str, TandemClient], tiny_oracle: Oracle, signum: signal.Signals
) -> None:
    rng = random.Random(signum)
    victim, other = ROUTERS if signum is signal.SIGKILL else ROUTERS[::-1]
    old_pid = pid_of(served, victim)
    old_restarts = {name: num_restarts(served, name) for name in ROUTERS}
    lost = [
        LiveStream(served, random_ids(rng, 60), client=clients[victim], max_tokens=NUM_TOKENS, ignore_eos=True)
        for _ in range(3)
    ]
    kept = [
        LiveStream(served, random_ids(rng, 60), client=clients[other], max_tokens=NUM_TOKENS, ignore_eos=True)
        for _ in range(3)
    ]
    for stream in (*lost, *kept):
        assert stream.wait_tokens(5)
    os.kill(old_pid, signum)
    struck = time.monotonic()
    for stream in kept:
        answer = stream.finish()
        assert answer.token_ids == tiny_oracle.generate(stream.prompt_ids, NUM_TOKENS, ignore_eos=True)
        assert answer.last.handover.attempts == 1
        assert stream.longest_gap() < MAX_GAP_S
    for stream in lost:
        with pytest.raises(TandemError) as ended:
            stream.finish()
        assert ended.value.code == "UNAVAILABLE"
    # The other router serves; soon the victim does too, at its old address.
    LiveStream(served, random_ids(rng, 20), client=clients[other], max_tokens=5).finish()
    wait_until(lambda: is_ready(clients[victim]), 30.0, "the router is back")
    assert time.monotonic() - struck < 25.0
    assert pid_of(served, victim) != old_pid
    restarts = {name: num_restarts(served, name) for name in ROUTERS}
    assert restarts == {victim: old_restarts[victim] + 1, other: old_restarts[other]}
    prompt = random_ids(rng, 30)
    answer = LiveStream(served, prompt, client=clients[victim], max_tokens=10).finish()
    assert answer.token_ids == tiny_oracle.generate(prompt, 10)


def strike_again_and_again(
    served: ServedCluster,
    clients: dict[str, TandemClient],
    oracle: Oracle,
    signum: signal.Signals,
    num_repetitions: int,
) -> tuple[float, float]:
    """End routers in turn under load. Streams of unbound clients must get exactly their tokens.

    Returns the longest gaps: of streams on untouched routers, and of all others.
    """
    rng = random.Random(f"{signum} {num_repetitions}")
    kept_gap = other_gap = 0.0
    with TandemClient(served.cluster.addresses.grpc) as anywhere:
        for number in range(num_repetitions):
            for client in clients.values():
                wait_until(lambda client=client: is_ready(client), 30.0, "all routers are there")
            victim, other = ROUTERS if number % 2 else ROUTERS[::-1]
            going_on = [
                LiveStream(
                    served,
                    random_ids(rng, rng.choice((20, 60))),
                    client=anywhere,
                    max_tokens=NUM_TOKENS,
                    temperature=rng.choice((0.0, 0.9)),
                    seed=number,
                    ignore_eos=True,
                )
                for _ in range(4)
            ]
            kept = LiveStream(
                served, random_ids(rng, 30), client=clients[other], max_tokens=NUM_TOKENS, ignore_eos=True
            )
            rng.choice(going_on).wait_tokens(rng.choice((0, 1, 1, rng.randrange(2, NUM_TOKENS // 2))))
            os.kill(pid_of(served, victim), signum)
            for stream in (*going_on, kept):
                answer = stream.finish()
                if not stream.sampling.get("temperature"):
                    assert answer.token_ids == oracle.generate(stream.prompt_ids, NUM_TOKENS, ignore_eos=True)
                assert len(answer.token_ids) == NUM_TOKENS == answer.last.usage.completion_tokens
                undisturbed = served.complete(stream.prompt_ids, **stream.sampling)
                # In another batch the last bits of logits differ, and with them one sampled token in thousands.
                if not stream.sampling.get("temperature") or answer.token_ids == undisturbed.token_ids:
                    assert (answer.token_ids, answer.text) == (undisturbed.token_ids, undisturbed.text)
            other_gap = max(other_gap, *(stream.longest_gap() for stream in going_on))
            kept_gap = max(kept_gap, kept.longest_gap())
            served.wait_clean(within_s=10.0)
    return kept_gap, other_gap


@pytest.mark.parametrize(
    "signum",
    [
        pytest.param(signal.SIGKILL, id="kill"),
        # A client waits for a stopped router's timeout, and may meet another stopped one.
        pytest.param(signal.SIGSTOP, id="stop", marks=pytest.mark.slow),
    ],
)
def test_streams_outlive_their_router(
    served: ServedCluster, clients: dict[str, TandemClient], tiny_oracle: Oracle, signum: signal.Signals
) -> None:
    kept_gap, _ = strike_again_and_again(served, clients, tiny_oracle, signum, 2)
    assert kept_gap < MAX_GAP_S


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_streams_outlive_any_number_of_routers(
    served: ServedCluster, clients: dict[str, TandemClient], tiny_oracle: Oracle, signum: signal.Signals
) -> None:
    kept_gap, other_gap = strike_again_and_again(served, clients, tiny_oracle, signum, 20)
    print(f"{signum.name}: longest gap {kept_gap:.2f} s where the router was left alone, {other_gap:.2f} s elsewhere")
    assert kept_gap < MAX_GAP_S


def strike_event_streams(
    served: ServedCluster,
    clients: dict[str, TandemClient],
    oracle: Oracle,
    signum: signal.Signals,
    num_repetitions: int,
) -> None:
    """End routers under HTTP event streams, which must get exactly their text."""
    rng = random.Random(f"events {signum} {num_repetitions}")
    for number in range(num_repetitions):
        for client in clients.values():
            wait_until(lambda client=client: is_ready(client), 30.0, "all routers are there")
        victim, other = ROUTERS if number % 2 else ROUTERS[::-1]
        addresses = [served.cluster.routers[name].http for name in (victim, other)]
        prompts = [random_ids(rng, rng.choice((20, 60))) for _ in range(4)]
        body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "seed": number}
        usage = {"stream_options": {"include_usage": True}}
        struck = [EventClient(addresses, {**body, **usage, "prompt": prompt}) for prompt in prompts]
        kept = EventClient(addresses[::-1], {**body, **usage, "prompt": prompts[0]})
        assert rng.choice(struck).wait_characters(rng.randrange(1, NUM_TOKENS // 3))
        os.kill(pid_of(served, victim), signum)
        for stream, prompt in zip((*struck, kept), (*prompts, prompts[0]), strict=True):
            assert stream.finish() == oracle.decode(oracle.generate(prompt, NUM_TOKENS, ignore_eos=True))
            assert (stream.finish_reasons, len(stream.usages), len(stream.answer_ids)) == (["length"], 1, 1)
            assert stream.usages[0]["completion_tokens"] == NUM_TOKENS
        assert any(stream.num_breaks for stream in struck) and not kept.num_breaks
        served.wait_clean(within_s=10.0)


def test_streams_of_text_outlive_their_router(
    served: ServedCluster, clients: dict[str, TandemClient], tiny_oracle: Oracle
) -> None:
    strike_event_streams(served, clients, tiny_oracle, signal.SIGKILL, 1)
    addresses = [served.cluster.routers[ROUTERS[0]].http]
    with pytest.raises(RefusedError, match="nothing is known") as refused:
        EventClient(addresses, {"prompt": [1]}, last_event_id=f"{'A' * 22}.1.1").finish()
    assert refused.value.status == 404


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_streams_of_text_outlive_any_number_of_routers(
    served: ServedCluster, clients: dict[str, TandemClient], tiny_oracle: Oracle, signum: signal.Signals
) -> None:
    strike_event_streams(served, clients, tiny_oracle, signum, 8)
