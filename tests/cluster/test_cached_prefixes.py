"""Cached prefixes that workers report to routers."""

import random
import re
import urllib.request

from tandem.client import TandemClient
from tests.cluster.conftest import Answer, ServedCluster, random_ids, wait_until

PAGE_SIZE = 16


def ask(served: ServedCluster, client: TandemClient, prompt_ids: list[int], max_tokens: int) -> Answer:
    answer = Answer()
    for response in client.generate(served.request(prompt_ids, max_tokens=max_tokens, ignore_eos=True), timeout_s=30.0):
        answer.add(response)
    return answer


def known_pages(served: ServedCluster, router: str) -> dict[str, float]:
    """Return the cached pages by worker, as a router knows them."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{served.cluster.routers[router].http}/metrics", timeout=5.0) as answer:
        text = answer.read().decode()
    lines = re.findall(r'^tandem_known_prefix_pages\{.*worker="(.*)"\} (.*)$', text, re.MULTILINE)
    return {worker: float(value) for worker, value in lines}


def cached_pages(served: ServedCluster) -> dict[str, float]:
    """Return the cached pages by worker, from the workers' own accounts."""
    return {worker: float(report.stats.num_cached_pages) for worker, report in served.integrity().items()}


def wait_idle(*clients: TandemClient) -> None:
    """Wait until the routers know of no request, of each other's neither: a running one changes the choice."""
    for client in clients:
        wait_until(lambda c=client: not c.server_info().num_requests, 5.0, "the router knows of no request")


def test_prefixes_are_shared_across_routers(tiny_routers: ServedCluster) -> None:
    served = tiny_routers
    rng = random.Random(0)
    routers = served.cluster.routers
    with (
        TandemClient(routers["router-0"].grpc, one_router=True) as first,
        TandemClient(routers["router-1"].grpc, one_router=True) as second,
    ):
        begun = []
        for _ in range(6):
            prompt_ids = random_ids(rng, 2 * PAGE_SIZE)
            begun.append((prompt_ids, ask(served, first, prompt_ids, 2 * PAGE_SIZE + 1)))
        for router in routers:
            wait_until(lambda r=router: known_pages(served, r) == cached_pages(served), 5.0, f"{router} knows")
        for prompt_ids, answer in begun:
            going_on = [*prompt_ids, *answer.token_ids, *random_ids(rng, PAGE_SIZE)]
            wait_idle(second)
            # Here the router may finish before the prefill worker's report.
            handover = ask(served, second, going_on, 2).last.handover
            assert handover.decode_worker == answer.last.handover.decode_worker
            # Only the decode worker also cached the output.
            assert handover.prefill_cached_tokens == 2 * PAGE_SIZE
            assert handover.decode_cached_tokens == 4 * PAGE_SIZE
