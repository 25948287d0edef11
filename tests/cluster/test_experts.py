"""Mixtures of experts through the whole cluster: every stream has transformers' tokens, and every expert's tokens are
counted."""

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.client import make_request
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.process_tree import end_processes
from tandem.engine.expert_balance import MIN_MEAN
from tests.cluster.command import start, tandem
from tests.cluster.conftest import CHUNK_SIZE, Answer, Clusters, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream, QuickConfig, wait_whole
from tests.cluster.tiny_experts import FAMILIES, ClearOracle, save_tiny_experts

PAGE_SIZE = 16
# One family in the quick suite, whose pages hold latents and index keys; the routers and workers of all are the same.
SAMPLE = "deepseek_v32"
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "1P1D": {"num_prefill": 1, "num_decode": 1, "num_both": 0},
    "1 both": {"num_prefill": 0, "num_decode": 0, "num_both": 1},
}
# Enough for all streams of a test, so that only a fault makes an attempt end early.
NUM_PAGES = 400
MAX_TOKENS = 24
LENGTHS = (1, 16, 17, 47, 48, 49, 100, 150, 230)
NUM_RUNNING = 4
NUM_WAITING = 6
NUM_EXPERTS, NUM_CHOSEN = FAMILIES[SAMPLE]["n_routed_experts"], FAMILIES[SAMPLE]["num_experts_per_tok"]
COUNTED_TOKENS = 120
COUNTED_LENGTHS = (200, 131, 17)
LAYERS = ("1-1", "2-2")


def slow_except(quick: str, names: Iterable[str]) -> list[Any]:
    """Return parameters of which only `quick` is part of the quick suite."""
    return [pytest.param(name, marks=[] if name == quick else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=slow_except(SAMPLE, FAMILIES))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts") / f"tiny-{request.param}"
    save_tiny_experts(directory, request.param)
    return directory


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> ClearOracle:
    return ClearOracle(model_dir)


@pytest.fixture(scope="module", params=slow_except("1P1D", LAYOUTS))
def config(request: pytest.FixtureRequest, model_dir: Path) -> ClusterConfig:
    return QuickConfig(
        model=str(model_dir),
        dtype="float32",
        num_pages=NUM_PAGES,
        chunk_size=CHUNK_SIZE,
        num_threads=1,
        # Wrong drafts would be computed and counted too.
        speculation="off",
        grpc_port=0,
        http_port=0,
        **LAYOUTS[request.param],
    )


@pytest.fixture
def served(clusters: Clusters, config: ClusterConfig) -> Iterator[ServedCluster]:
    served = clusters.get(config)
    wait_whole(served)
    yield served
    served.wait_clean()


def scrape(served: ServedCluster, worker_id: str) -> dict[tuple[str, str], float]:
    """Return values by name and layers, without buckets."""
    worker = served.worker(worker_id)
    assert worker is not None
    with build_opener(ProxyHandler({})).open(f"http://{worker.metrics_address}/metrics", timeout=5.0) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {(sample.name, sample.labels.get("layers", "")): sample.value for sample in samples}


# The first test: it counts from the workers' start.
@pytest.mark.parametrize(("model_dir", "config"), [(SAMPLE, "1P1D")], indirect=True)
def test_every_computed_token_counts_once_per_chosen_expert(served: ServedCluster) -> None:
    rng = random.Random(1)
    prompts = [random_ids(rng, length) for length in COUNTED_LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: served.complete(p, max_tokens=COUNTED_TOKENS, ignore_eos=True), prompts))
    assert all(len(answer.token_ids) == COUNTED_TOKENS for answer in answers)
    num_decoded = len(prompts) * (COUNTED_TOKENS - 1)
    # The last layer computes only the rows that a sampled token follows.
    expected = {"prefill-0": (sum(COUNTED_LENGTHS), len(prompts)), "decode-0": (num_decoded, num_decoded)}
    for worker_id, num_tokens in expected.items():

        def counted(worker_id: str = worker_id) -> list[float]:
            scraped = scrape(served, worker_id)
            return [scraped["tandem_expert_tokens_total", layers] for layers in LAYERS]

        wanted = [NUM_CHOSEN * number for number in num_tokens]
        wait_until(lambda counted=counted, wanted=wanted: counted() == wanted, 10.0, f"{worker_id} counts {wanted}")
    # Once read, counters stand still.
    for worker_id, num_tokens in expected.items():
        scraped = scrape(served, worker_id)
        for layers, number in zip(LAYERS, num_tokens, strict=True):
            num_observed = scraped["tandem_expert_imbalance_count", layers]
            total = scraped["tandem_expert_imbalance_sum", layers]
            most = NUM_CHOSEN * number / NUM_EXPERTS // MIN_MEAN
            assert (num_observed == 0) == (most == 0) and num_observed <= most
            assert num_observed <= total <= num_observed * NUM_EXPERTS / NUM_CHOSEN


def test_greedy_tokens_in_chunks_and_batches(served: ServedCluster, oracle: ClearOracle) -> None:
    rng = random.Random(2)
    prompts = [random_ids(rng, n) for n in LENGTHS]
    assert max(map(len, prompts)) > 4 * CHUNK_SIZE
    expected = [oracle.generate(prompt, MAX_TOKENS) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=MAX_TOKENS), prompts))
    for answer, output_ids in zip(answers, expected, strict=True):
        assert answer.token_ids == output_ids
        assert answer.text == oracle.decode(output_ids)
        assert answer.last.handover.attempts == 1


def test_greedy_tokens_after_a_cached_prefix(served: ServedCluster, oracle: ClearOracle) -> None:
    rng = random.Random(2)
    stem = random_ids(rng, 6 * PAGE_SIZE + 5)
    prompts = [stem + random_ids(rng, n) for n in (30, 60, 1)]
    answers = [served.complete(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.generate(prompt, MAX_TOKENS)
    handovers = [answer.last.handover for answer in answers]
    assert [h.prefill_cached_tokens for h in handovers] == [0, 6 * PAGE_SIZE, 6 * PAGE_SIZE]
    # A worker of role `both` ships and leases nothing.
    assert {h.decode_cached_tokens for h in handovers[1:]} == {6 * PAGE_SIZE}


def test_sampled_tokens_depend_on_the_seed_alone(served: ServedCluster, oracle: ClearOracle) -> None:
    prompt_ids = random_ids(random.Random(3), 70)
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 5}
    requests = [sampling] * 3 + [{**sampling, "seed": seed} for seed in (6, 7)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = pool.map(
            lambda asked: served.complete(prompt_ids, max_tokens=MAX_TOKENS, ignore_eos=True, **asked), requests
        )
        outputs = [answer.token_ids for answer in answers]
    assert len(outputs[0]) == MAX_TOKENS and oracle.confirms_sampled(prompt_ids, outputs[0], **sampling)
    assert outputs[:3] == [outputs[0]] * 3
    assert outputs[0] not in outputs[3:]


def test_output_follows_its_grammar(served: ServedCluster) -> None:
    pattern = "[a-f]{3,20}(-[0-9]{2}){1,3}"
    answer = Answer()
    request = make_request([1, 2, 3], structured_output={"regex": pattern}, max_tokens=100)
    for response in served.client.generate(request, timeout_s=30.0):
        answer.add(response)
    assert re.fullmatch(pattern, answer.text)


@pytest.mark.parametrize(
    ("config", "victims"),
    [
        ("1P1D", ["decode"]),
        pytest.param("1P1D", ["prefill"], marks=pytest.mark.slow),
        pytest.param("1P1D", ["prefill", "decode"], marks=pytest.mark.slow),
        pytest.param("1 both", ["both"], marks=pytest.mark.slow),
    ],
    indirect=["config"],
)
def test_streams_outlive_a_kill(served: ServedCluster, oracle: ClearOracle, victims: list[str]) -> None:
    rng = random.Random(str(victims))
    running = [LiveStream(served, random_ids(rng, 60), max_tokens=250, ignore_eos=True) for _ in range(NUM_RUNNING)]
    for stream in running:
        stream.wait_tokens(20)
    waiting = [LiveStream(served, random_ids(rng, 380), max_tokens=60, ignore_eos=True) for _ in range(NUM_WAITING)]
    waiting[0].wait_tokens(1)
    for role in victims:
        served.kill(f"{role}-0")
    for stream in running + waiting:
        answer = stream.finish()
        assert len(answer.token_ids) == stream.sampling["max_tokens"]
        assert oracle.confirms(stream.prompt_ids, answer.token_ids)
    # A dead prefill worker has no part in running streams.
    struck = waiting if victims == ["prefill"] else running
    assert max(stream.answer.last.handover.attempts for stream in struck) > 1


@pytest.mark.slow
def test_served_without_weights(clusters: Clusters, tmp_path: Path) -> None:
    """`--load-format dummy` needs no weights. Workers link, so their fingerprints are equal."""
    clusters.close()
    directory = tmp_path / "tiny-dots1"
    save_tiny_experts(directory, "dots1")
    (directory / "model.safetensors").unlink()
    flags = ("--model", str(directory), "--load-format", "dummy", "--num-pages", "64")
    server = start(*flags, runtime_dir=tmp_path)
    try:
        answered = tandem("generate", "--raw", "--max-tokens", "9", "--timings", "--address", server.address, "hello")
        assert (answered.returncode, answered.stderr) == (0, "")
        assert "decode-0: 0 tokens found in its radix cache, 1 page shipped to it" in answered.stdout
        status = tandem("status", "--address", server.address)
        assert status.stdout.startswith("tiny-dots1 (length 512), ready")
    finally:
        end_processes([p for p in server.tree if p.is_alive()], 5.0)
