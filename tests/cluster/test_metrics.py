"""The workers' metrics agree with the clients' requests."""

import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import NUM_PAGES, VOCAB_SIZE, ServedCluster, wait_until

# Keys and values, 2 layers, 2 heads, 16 floats of 4 bytes, 16 tokens.
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 16
# Process metrics: the scrape target names the process.
OF_EVERY_PROCESS = ("process_", "tandem_build_info", "tandem_process_")


@dataclass
class Scrape:
    """Metrics by name and distinguishing label, if any."""

    values: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))

    def __getitem__(self, name: str) -> float:
        (value,) = self.values[name].values()
        return value


def read(address: str, path: str = "/metrics") -> str:
    """Raises HTTPError unless the status is 200."""
    with build_opener(ProxyHandler({})).open(f"http://{address}{path}", timeout=5.0) as response:
        return response.read().decode()


def scrape(served: ServedCluster) -> tuple[Scrape, Scrape]:
    """Return metrics of the prefill worker and the decode worker."""
    scrapes = []
    for role in ("prefill", "decode"):
        worker = served.worker(f"{role}-0")
        assert worker is not None
        result = Scrape()
        for family in text_string_to_metric_families(read(worker.metrics_address)):
            for sample in family.samples:
                if sample.name.startswith(OF_EVERY_PROCESS):
                    continue
                assert sample.labels["worker"] == worker.worker_id
                assert sample.labels.get("role", role) == role
                kind = sample.labels.get("state") or sample.labels.get("transport", "")
                result.values[sample.name][kind] = sample.value
        scrapes.append(result)
    prefill, decode = scrapes
    return prefill, decode


def random_ids(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


def growth(before: Scrape, after: Scrape, name: str) -> float:
    return after[name] - before[name]


def test_metrics_match_the_requests(tiny_pd: ServedCluster) -> None:
    prefill_before, decode_before = scrape(tiny_pd)
    stem = random_ids(70, seed=1)
    prompts: Sequence[list[int]] = [stem, [*stem, *random_ids(30, seed=2)], random_ids(5, seed=3), stem]
    answers = [tiny_pd.complete(prompt, max_tokens=6, ignore_eos=True).last for prompt in prompts]
    tiny_pd.wait_clean()
    prefill, decode = scrape(tiny_pd)

    computed = growth(prefill_before, prefill, "tandem_prefill_computed_tokens_total")
    cached = growth(prefill_before, prefill, "tandem_prefix_cached_tokens_total")
    assert computed + cached == sum(len(prompt) for prompt in prompts)
    assert cached == sum(last.handover.prefill_cached_tokens for last in answers) == 64 + 64
    assert growth(decode_before, decode, "tandem_prefill_computed_tokens_total") == 0
    assert growth(decode_before, decode, "tandem_prefix_cached_tokens_total") == sum(
        last.handover.decode_cached_tokens for last in answers
    )

    num_shipped = sum(last.handover.pages_shipped for last in answers)
    assert num_shipped > 0
    (transport,) = prefill.values["tandem_kv_shipped_pages_total"]
    assert transport == "shared_memory"
    assert growth(prefill_before, prefill, "tandem_kv_shipped_pages_total") == num_shipped
    assert growth(prefill_before, prefill, "tandem_kv_shipped_bytes_total") == num_shipped * PAGE_BYTES
    assert not decode.values["tandem_kv_shipped_pages_total"]

    for scraped in (prefill, decode):
        pages = scraped.values["tandem_kv_pages"]
        assert set(pages) == {"free", "cached", "locked", "leased"}
        assert sum(pages.values()) == NUM_PAGES
        assert pages["locked"] == pages["leased"] == 0
        assert scraped["tandem_worker_queue_length"] == scraped["tandem_worker_running_requests"] == 0
    assert growth(prefill_before, prefill, "tandem_worker_steps_total") >= len(prompts)
    assert growth(decode_before, decode, "tandem_worker_steps_total") >= 5 * len(prompts)


def test_running_requests_are_counted(tiny_pd: ServedCluster) -> None:
    def running() -> Scrape | None:
        _, decode = scrape(tiny_pd)
        return decode if decode["tandem_worker_running_requests"] else None

    with ThreadPoolExecutor(3) as pool:
        prompts = [random_ids(40, seed=n) for n in (4, 5, 6)]
        answers = [pool.submit(tiny_pd.complete, p, max_tokens=400, ignore_eos=True) for p in prompts]
        decode = wait_until(running, 20.0, "a request runs at the decode worker")
        assert all(answer.result().last.finish_reason for answer in answers)
    assert decode["tandem_worker_running_requests"] <= 3
    pages = decode.values["tandem_kv_pages"]
    assert pages["locked"] >= 3 * decode["tandem_worker_running_requests"]
    assert sum(pages.values()) == NUM_PAGES


def test_metrics_port_serves_only_metrics(tiny_pd: ServedCluster) -> None:
    for worker in tiny_pd.client.server_info().workers:
        assert worker.metrics_address.startswith("127.0.0.1:")
        with pytest.raises(HTTPError, match="404"):
            read(worker.metrics_address, "/")
