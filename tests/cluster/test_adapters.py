"""LoRA adapters over one base model, through a prefill and a decode worker."""

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.client import TandemClient, TandemError
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.models.config import ModelConfig
from tests.cluster.adapters import RANKS, AdapterOracle, write_adapters
from tests.cluster.conftest import RESTART_S, Answer, Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.wire import HttpAnswer, http
from tests.fakes.adapters import write_adapter

MAX_TOKENS = 12
PAGE_SIZE = 16
ADMIN_KEY = "the-admin-key"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def paths(root: Path, tiny_model_dir: Path) -> Mapping[str, Path]:
    return write_adapters(root, tiny_model_dir)


@pytest.fixture(scope="module")
def oracles(paths: Mapping[str, Path], tiny_model_dir: Path, tiny_oracle: Oracle) -> Mapping[str, Oracle]:
    """By the model's name; "": the base model."""
    return {"": tiny_oracle, **{name: AdapterOracle(tiny_model_dir, path) for name, path in paths.items()}}


@pytest.fixture
def served(
    clusters: Clusters, tiny_config: ClusterConfig, root: Path, paths: Mapping[str, Path]
) -> Iterator[ServedCluster]:
    """Half as many slots as adapters."""
    config = replace(
        tiny_config,
        lora=tuple(f"{name}={path}" for name, path in paths.items()),
        lora_root=str(root),
        admin_keys=(ADMIN_KEY,),
        max_loras=len(RANKS) // 2,
        num_routers=2,
        routing="cache_aware",
    )
    served = clusters.get(config)
    yield served
    served.wait_clean()


def complete(served: ServedCluster, model: str, prompt_ids: list[int], **sampling: Any) -> Answer:
    return generate(served.client, served, model, prompt_ids, **sampling)


def test_one_batch_mixes_adapters_of_all_ranks_and_the_base(
    served: ServedCluster, oracles: Mapping[str, Oracle]
) -> None:
    stem = random_ids(random.Random(1), 40)
    prompts = {model: [*stem, *random_ids(random.Random(n), n)] for n, model in enumerate(oracles)}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda model: complete(served, model, prompts[model]), prompts)
        for (model, prompt_ids), answer in zip(prompts.items(), answers, strict=True):
            assert answer.token_ids == oracles[model].generate(prompt_ids, MAX_TOKENS), model
            assert answer.last.handover.prefill_cached_tokens == 0, "no page of another adapter is reused"
            assert answer.last.handover.decode_cached_tokens == 0
    for model, prompt_ids in prompts.items():
        answer = complete(served, model, prompt_ids)
        assert answer.last.handover.prefill_cached_tokens >= 2 * PAGE_SIZE, "its own pages are"
        assert answer.token_ids == oracles[model].generate(prompt_ids, MAX_TOKENS)


@pytest.fixture
def admin(served: ServedCluster) -> Iterator[TandemClient]:
    with TandemClient(served.cluster.addresses.grpc, ADMIN_KEY) as client:
        yield client


@pytest.fixture
def routers(served: ServedCluster) -> Iterator[list[TandemClient]]:
    """A client of each router, without failover."""
    with ExitStack() as stack:
        addresses = [router.grpc_address for router in served.client.server_info().routers]
        yield [stack.enter_context(TandemClient(address, one_router=True)) for address in addresses]


def generate(client: TandemClient, served: ServedCluster, model: str, prompt_ids: list[int], **sampling: Any) -> Answer:
    request = served.request(prompt_ids, **{"max_tokens": MAX_TOKENS, **sampling})
    request.model = model
    answer = Answer()
    for response in client.generate(request, timeout_s=60.0):
        answer.add(response)
    assert answer.last.finish_reason
    return answer


def copy_adapter(source: Path, destination: Path) -> Path:
    """Replaces a directory by another one at once."""
    if destination.exists():
        shutil.rmtree(destination)
    return Path(shutil.copytree(source, destination))


def test_a_name_is_served_by_every_router_from_its_load_to_its_unload(
    served: ServedCluster, admin: TandemClient, routers: list[TandemClient], root: Path, paths: Mapping[str, Path]
) -> None:
    copy_adapter(paths["rank-4"], root / "more")
    loaded = admin.load_adapter("more", "more")
    assert (loaded.rank, loaded.path) == (4, str(root / "more"))
    prompt_ids = random_ids(random.Random(5), 50)
    answers = [generate(router, served, "more", prompt_ids).token_ids for router in routers]
    assert answers[0] == answers[1] == generate(routers[0], served, "rank-4", prompt_ids).token_ids
    assert admin.load_adapter("more", str(root / "more")).content_hash == loaded.content_hash, "a second load is none"
    assert {one.name for one in routers[1].list_adapters()} == {*paths, "more"}
    admin.unload_adapter("more")
    for router in routers:
        assert {one.name for one in router.list_adapters()} == {*paths}
        with pytest.raises(TandemError, match="model 'more' is not served here; 'tiny-llama' is, and 8 adapters"):
            generate(router, served, "more", prompt_ids)
    with pytest.raises(TandemError, match="no adapter 'more' is loaded") as unknown:
        admin.unload_adapter("more")
    assert unknown.value.code == "NOT_FOUND"


def test_pages_belong_to_the_content_and_not_to_the_name(
    served: ServedCluster, admin: TandemClient, root: Path, paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt_ids = random_ids(random.Random(6), 64)
    copy_adapter(paths["rank-2"], root / "one")
    copy_adapter(paths["rank-2"], root / "two")
    admin.load_adapter("one", "one")
    admin.load_adapter("two", "two")
    first, second = (complete(served, name, prompt_ids) for name in ("one", "two"))
    assert first.token_ids == second.token_ids == oracles["rank-2"].generate(prompt_ids, MAX_TOKENS)
    assert first.last.handover.prefill_cached_tokens == 0
    assert second.last.handover.prefill_cached_tokens == second.last.handover.decode_cached_tokens - PAGE_SIZE == 48
    copy_adapter(paths["rank-8"], root / "one")
    with pytest.raises(TandemError, match=r"'one' is loaded with another content, from .*: unload it first"):
        admin.load_adapter("one", "one")
    admin.load_adapter("one", "one", in_place=True)
    other = complete(served, "one", prompt_ids)
    assert other.last.handover.prefill_cached_tokens == other.last.handover.decode_cached_tokens == 0
    assert other.token_ids == oracles["rank-8"].generate(prompt_ids, MAX_TOKENS) != first.token_ids
    for name in ("one", "two"):
        admin.unload_adapter(name)


def test_running_requests_end_with_the_content_that_they_began_with(
    served: ServedCluster, admin: TandemClient, root: Path, paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt_ids = random_ids(random.Random(7), 30)
    copy_adapter(paths["rank-6"], root / "leaving")
    admin.load_adapter("leaving", "leaving")
    request = served.request(prompt_ids, max_tokens=200, ignore_eos=True)
    request.model = "leaving"
    answer = Answer()
    stream = served.client.generate(request, timeout_s=60.0)
    answer.add(next(stream))
    admin.unload_adapter("leaving")
    copy_adapter(paths["rank-16"], root / "leaving")
    admin.load_adapter("leaving", "leaving")
    new = complete(served, "leaving", prompt_ids)
    for response in stream:
        answer.add(response)
    assert oracles["rank-6"].confirms(prompt_ids, answer.token_ids) and len(answer.token_ids) == 200
    assert new.token_ids == oracles["rank-16"].generate(prompt_ids, MAX_TOKENS)
    admin.unload_adapter("leaving")


def test_bad_adapters_are_refused_and_nothing_is_loaded(
    served: ServedCluster, admin: TandemClient, root: Path, paths: Mapping[str, Path], tmp_path: Path
) -> None:
    before = [one.name for one in admin.list_adapters()]
    bad = copy_adapter(paths["rank-4"], root / "bad")
    (bad / "adapter_model.safetensors").rename(bad / "adapter_model.bin")
    outside = copy_adapter(paths["rank-4"], tmp_path / "outside")
    (root / "link").symlink_to(outside)
    for name, path, message in (
        ("bad", "bad", "is a pickle file, which may run code"),
        ("bad", "nowhere", "there is no directory nowhere below --lora-root"),
        ("bad", str(outside), "lies outside --lora-root"),
        ("bad", "../outside", "lies outside --lora-root"),
        ("bad", "link", "lies outside --lora-root"),
        ("tiny-llama", "rank-4", "'tiny-llama' is a name of the served model"),
        ("", "rank-4", "an adapter's name must be 1 to 256 printable characters"),
        ("bad", "", "lora_path must be the path of a PEFT directory"),
    ):
        with pytest.raises(TandemError, match=message) as refused:
            admin.load_adapter(name, path)
        assert refused.value.code == "INVALID_ARGUMENT"
    assert [one.name for one in admin.list_adapters()] == before
    with (
        TandemClient(served.cluster.addresses.grpc, "an-ordinary-key") as other,
        pytest.raises(TandemError, match="an admin key is needed"),
    ):
        other.load_adapter("bad", "rank-4")


def test_the_http_api_names_adapters_as_vllm_does(
    served: ServedCluster, paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tiny_oracle: Oracle
) -> None:
    url = f"http://{served.cluster.addresses.http}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        models = {model.id: model.model_dump() for model in client.models.list()}
        assert {name: models[name]["root"] for name in paths} == {name: str(path) for name, path in paths.items()}
        assert {models[name]["parent"] for name in paths} == {"tiny-llama"} and models["tiny-llama"]["parent"] is None
        assert client.models.retrieve("rank-3").id == "rank-3"
        prompt_ids = random_ids(random.Random(8), 20)
        answer = client.completions.create(model="rank-3", prompt=prompt_ids, max_tokens=8, temperature=0)
        assert answer.model == "rank-3"
        assert answer.choices[0].text == tiny_oracle.decode(oracles["rank-3"].generate(prompt_ids, 8))
        chat = client.chat.completions.create(model="rank-3", messages=[{"role": "user", "content": "x"}], max_tokens=4)
        assert chat.model == "rank-3"
    assert post(served, "load", lora_name="by-http", lora_path="rank-1", key="ordinary").status == 401
    loaded = post(served, "load", lora_name="by-http", lora_path="rank-1")
    assert loaded.status == 200 and json.loads(loaded.body)["rank"] == 1, loaded.body
    assert post(served, "unload", lora_name="by-http").status == 200
    assert post(served, "unload", lora_name="by-http").status == 404


def post(served: ServedCluster, action: str, *, key: str = ADMIN_KEY, **body: str) -> HttpAnswer:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return http(served, "POST", f"/v1/{action}_lora_adapter", json.dumps(body).encode(), headers)


@pytest.mark.slow
def test_streams_keep_their_content_after_the_death_of_a_worker(
    served: ServedCluster, admin: TandemClient, root: Path, paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt_ids = random_ids(random.Random(9), 40)
    copy_adapter(paths["rank-12"], root / "mortal")
    admin.load_adapter("mortal", "mortal")
    request = served.request(prompt_ids, max_tokens=150, ignore_eos=True)
    request.model = "mortal"
    answer = Answer()
    for response in served.client.generate(request, timeout_s=60.0):
        if not answer.token_ids:
            served.kill("decode-0")
        answer.add(response)
    assert answer.last.handover.attempts > 1
    assert oracles["rank-12"].confirms(prompt_ids, answer.token_ids) and len(answer.token_ids) == 150
    served.wait_ready()
    admin.unload_adapter("mortal")


@pytest.mark.slow
def test_a_restarted_router_knows_all_names(
    served: ServedCluster, admin: TandemClient, routers: list[TandemClient], paths: Mapping[str, Path]
) -> None:
    admin.load_adapter("kept", "rank-1")
    admin.unload_adapter("rank-16")
    for info in served.client.server_info().routers:
        os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_ready, routers)), RESTART_S, "both routers are back")
    for router in routers:
        assert {one.name for one in router.list_adapters()} == ({*paths, "kept"} - {"rank-16"})
        generate(router, served, "kept", [1, 2, 3])
    admin.unload_adapter("kept")
    admin.load_adapter("rank-16", "rank-16")


def is_ready(router: TandemClient) -> bool:
    try:
        return router.server_info().ready
    except TandemError:
        return False


NUM_CYCLES = 1000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_loads_and_unloads_under_load(
    served: ServedCluster, admin: TandemClient, root: Path, tiny_model_dir: Path, oracles: Mapping[str, Oracle]
) -> None:
    model = ModelConfig.from_dir(tiny_model_dir)
    prompt_ids = random_ids(random.Random(10), 30)
    expected = {name: oracles[name].generate(prompt_ids, MAX_TOKENS) for name in ("", "rank-2", "rank-8", "rank-16")}
    stop = threading.Event()

    def keep_asking(name: str) -> int:
        num_answers = 0
        while not stop.is_set():
            assert complete(served, name, prompt_ids).token_ids == expected[name]
            num_answers += 1
        return num_answers

    memory: list[dict[str, int]] = []
    with ThreadPoolExecutor(len(expected)) as pool:
        asking = [pool.submit(keep_asking, name) for name in expected]
        try:
            for number in range(NUM_CYCLES):
                # Another content each time, and another name: nothing of one may stay for the next.
                path = write_adapter(root / "passing", model, rank=4, seed=1000 + number)
                admin.load_adapter(f"passing-{number}", "passing")
                complete(served, f"passing-{number}", prompt_ids, max_tokens=2)
                admin.unload_adapter(f"passing-{number}")
                shutil.rmtree(path)
                if number % 250 == 249:
                    memory.append(resident_bytes(served))
        finally:
            stop.set()
        assert all(task.result() > 0 for task in asking), "every model was served throughout"
    assert {one.name for one in admin.list_adapters()} == set(oracles) - {""}
    for process, before in memory[1].items():
        assert memory[-1][process] < 1.15 * before, f"{process} grew from {before} to {memory[-1][process]} bytes"


def resident_bytes(served: ServedCluster) -> dict[str, int]:
    info = served.client.server_info()
    pids = {worker.worker_id: worker.pid for worker in info.workers}
    pids |= {router.router_id: router.pid for router in info.routers}
    pages = {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for name, pid in pids.items()}
    return {name: os.sysconf("SC_PAGE_SIZE") * count for name, count in pages.items()}
