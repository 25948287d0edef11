"""Embeddings by prefill workers, against transformers: over HTTP and gRPC, beside requests with an output, under
faults."""

import json
import math
import random
import re
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tandem.client import TandemError
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.router.config import host_of, port_of
from tests.cluster.conftest import CHUNK_SIZE, Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import QuickConfig, wait_whole

MODEL = "tiny-llama"
LEAST_COSINE = 0.999
# Below, at and above page and chunk sizes, and several chunks.
LENGTHS = (1, 15, 16, 17, 33, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE, 200, 511, 512)


def cosine(values: Sequence[float], others: Sequence[float]) -> float:
    product = sum(a * b for a, b in zip(values, others, strict=True))
    return product / math.hypot(*values) / math.hypot(*others)


def check(oracle: Oracle, prompts: Sequence[Sequence[int]], embeddings: Sequence[Sequence[float]]) -> None:
    for prompt, embedding in zip(prompts, embeddings, strict=True):
        assert math.hypot(*embedding) == pytest.approx(1.0, abs=1e-4)
        assert cosine(embedding, oracle.embedding(prompt)) > LEAST_COSINE


@pytest.fixture
def client(tiny_pd: ServedCluster) -> Iterator[openai.OpenAI]:
    address = tiny_pd.cluster.addresses.http
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def test_the_stock_client_gets_transformers_hidden_states(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    rng = random.Random("embeddings 1")
    prompts = [random_ids(rng, length) for length in LENGTHS]
    # By default the client asks for base64 and decodes it.
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=MODEL, input=prompts, **options)  # type: ignore[arg-type]
        assert [item.index for item in answer.data] == list(range(len(prompts)))
        check(tiny_oracle, prompts, [item.embedding for item in answer.data])
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(LENGTHS)
    text = "The old lighthouse stood"
    [item] = client.embeddings.create(model=MODEL, input=text).data
    check(tiny_oracle, [tiny_oracle.tokenizer.encode(text).ids], [item.embedding])


def test_a_cached_prefix_skips_no_hidden_state(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    rng = random.Random("embeddings 2")
    stem = random_ids(rng, 160)
    prompts = [stem, stem, stem + random_ids(rng, 1), stem[:159], stem[:32], stem + random_ids(rng, 90)]
    num_cached = []
    for prompt in prompts:
        answer = client.embeddings.create(model=MODEL, input=prompt)
        check(tiny_oracle, [prompt], [answer.data[0].embedding])
        num_cached.append(answer.usage.model_extra["prompt_tokens_details"]["cached_tokens"])  # type: ignore[index]
    # Of a prompt that is cached whole the last page is computed again, for its last token's state.
    assert num_cached == [0, 144, 160, 144, 16, 160]


def test_prefixes_are_shared_with_requests_that_have_an_output(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random("embeddings 3")
    stem = random_ids(rng, 100)
    assert tiny_pd.complete(stem).token_ids == tiny_oracle.generate(stem, 24)
    [response] = tiny_pd.client.embed([*stem, 5])
    assert response.usage.cached_tokens == 96
    check(tiny_oracle, [[*stem, 5]], [response.values])
    other = random_ids(rng, 100)
    tiny_pd.client.embed(other)
    answer = tiny_pd.complete(other)
    assert answer.last.usage.cached_tokens == 96 and answer.token_ids == tiny_oracle.generate(other, 24)


def test_embeddings_beside_streams(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random("embeddings 4")
    prompts = [random_ids(rng, rng.randint(1, 300)) for _ in range(40)]
    streams = [random_ids(rng, rng.randint(1, 200)) for _ in range(6)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(tiny_pd.complete, prompt) for prompt in streams]
        responses = tiny_pd.client.embed(prompts, timeout_s=60.0)
        for prompt, answer in zip(streams, answers, strict=True):
            assert answer.result().token_ids == tiny_oracle.generate(prompt, 24)
    check(tiny_oracle, prompts, [response.values for response in responses])


def test_options(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    prompt = random_ids(random.Random("embeddings 5"), 600)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.embeddings.create(model=MODEL, input=prompt)
    for side, kept in (("right", prompt[:100]), ("left", prompt[-100:])):
        extra = {"truncate_prompt_tokens": 100, "truncation_side": side}
        answer = client.embeddings.create(model=MODEL, input=prompt, extra_body=extra)
        check(tiny_oracle, [kept], [answer.data[0].embedding])
    [item] = client.embeddings.create(model=MODEL, input=prompt[:9], extra_body={"normalize": False}).data
    assert cosine(item.embedding, tiny_oracle.embedding(prompt[:9])) > LEAST_COSINE
    assert math.hypot(*item.embedding) > 1.5
    with pytest.raises(openai.BadRequestError, match="not made to be cut to 8 dimensions"):
        client.embeddings.create(model=MODEL, input="x", dimensions=8)


def test_clients_that_leave_end_their_inputs(tiny_pd: ServedCluster) -> None:
    rng = random.Random("embeddings 6")
    address = tiny_pd.cluster.addresses.http
    for number in range(6):
        inputs = [random_ids(rng, 300) for _ in range(200)]
        body = json.dumps({"input": inputs}).encode()
        head = "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
        with socket.create_connection((host_of(address), port_of(address)), timeout=30.0) as connection:
            connection.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.1 * number)
        with pytest.raises(TandemError) as ended:
            tiny_pd.client.embed(inputs, timeout_s=0.05 + 0.1 * number)
        assert ended.value.code == "DEADLINE_EXCEEDED"
    tiny_pd.wait_clean(30.0)


@pytest.mark.timeout(240)
def test_embeddings_need_no_decode_worker(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    tiny_pd.kill("decode-0")
    wait_until(lambda: not tiny_pd.client.server_info().ready, 10.0, "the decode worker is lost")
    prompt = random_ids(random.Random("embeddings 9"), 90)
    began = time.monotonic()
    [response] = tiny_pd.client.embed(prompt, timeout_s=30.0)
    took_s = time.monotonic() - began
    info = tiny_pd.client.server_info()
    check(tiny_oracle, [prompt], [response.values])
    # It did not wait for the replacement.
    assert not info.ready or took_s < 1.0
    tiny_pd.wait_ready()


def quick(base: ClusterConfig) -> ClusterConfig:
    # Small chunks make prefills long.
    return QuickConfig(
        model=base.model,
        num_prefill=2,
        num_decode=1,
        num_pages=160,
        chunk_size=16,
        num_threads=1,
        grpc_port=0,
        http_port=0,
    )


def computed(served: ServedCluster, worker_id: str) -> int:
    worker = served.worker(worker_id)
    return worker.stats.prompt_tokens_computed if worker is not None else 0


def wait_computing(served: ServedCluster, worker_id: str) -> None:
    num_computed = computed(served, worker_id)
    # Its next report is of the prompts under way.
    wait_until(lambda: computed(served, worker_id) > num_computed, 30.0, f"{worker_id} embeds")


def restarts(served: ServedCluster) -> float:
    """Return the attempts after a request's first that were due to a lost worker."""
    text = urllib.request.urlopen(f"http://{served.cluster.addresses.http}/metrics", timeout=10.0).read().decode()
    [found] = re.findall(r'^tandem_restarts_total\{kind="worker_lost"\} (\S+)$', text, re.MULTILINE)
    return float(found)


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, 10])
def test_a_prefill_worker_killed_in_between_is_not_noticed(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, num_kills: int
) -> None:
    served = clusters.get(quick(tiny_config))
    rng = random.Random("embeddings 8")
    before = restarts(served)
    for number in range(num_kills):
        wait_whole(served)
        victim = f"prefill-{number % 2}"
        prompts = [random_ids(rng, rng.randint(100, 400)) for _ in range(150)]
        with ThreadPoolExecutor(1) as pool:
            embedding = pool.submit(served.client.embed, prompts, timeout_s=120.0)
            wait_computing(served, victim)
            assert not embedding.done()
            served.kill(victim)
            responses = embedding.result()
        check(tiny_oracle, prompts, [response.values for response in responses])
    assert restarts(served) >= before + num_kills, "each took prompts with it"
    wait_whole(served)
    served.wait_clean(10.0)
