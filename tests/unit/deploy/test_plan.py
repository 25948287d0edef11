"""Processes of a cluster over several nodes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ClientAddresses, ClusterPorts
from tandem.deploy.plan import PoolsOfNode, check_before_fetching, check_num_threads, plan
from tandem.engine.memory_needs import num_pool_bytes, num_weight_bytes
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.router.config import RouterAddresses
from tests.fakes.model_config import TINY_LLAMA

CONFIG = ClusterConfig("m", num_prefill=1, num_decode=2, num_pages=2**20)
PORTS = ClusterPorts(
    ClientAddresses("127.0.0.1:1", "127.0.0.1:2"),
    {"router-0": RouterAddresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")},
)


class Nodes:
    """prefill-0 has a node; the other workers share one."""

    def __init__(self, first_bytes: int, second_bytes: int) -> None:
        self._pools = [PoolsOfNode("10.0.0.1", 1, first_bytes), PoolsOfNode("10.0.0.2", 2, second_bytes)]

    def num_threads(self, worker: str) -> int:
        return 4 if worker == "prefill-0" else 2

    def pools(self) -> list[PoolsOfNode]:
        return self._pools


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def pool_bytes(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the bytes of one pool; this host has little memory."""
    monkeypatch.setattr("tandem.deploy.plan.available_memory_bytes", lambda: 2**26)
    with pytest.raises(ValueError, match="3 pools of") as caught:
        plan(CONFIG, model_dir, "", PORTS)
    return CONFIG.engine("").num_pages * int(str(caught.value).split(" bytes")[0].rsplit(" ", 1)[1])


def test_weights_and_pools_are_counted_node_by_node(model_dir: Path, pool_bytes: int) -> None:
    weight_bytes = num_weight_bytes(CONFIG.engine(""), ModelConfig.from_dir(model_dir))
    needed = pool_bytes + weight_bytes
    plan(CONFIG, model_dir, "", PORTS, nodes=Nodes(needed, 2 * needed))
    with pytest.raises(ValueError, match=r"^node 10\.0\.0\.2: 2 pools of .* use a num_pages of at most"):
        plan(CONFIG, model_dir, "", PORTS, nodes=Nodes(9 * needed, 2 * needed - 1))
    with pytest.raises(ValueError, match=r"^node 10\.0\.0\.2: the weights of 2 workers need"):
        plan(CONFIG, model_dir, "", PORTS, nodes=Nodes(9 * needed, 2 * weight_bytes))


def test_a_model_is_checked_before_its_weights_are_there(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.deploy.plan.available_memory_bytes", lambda: 2**40)
    check_before_fetching(CONFIG, model_dir)
    monkeypatch.setattr("tandem.deploy.plan.available_memory_bytes", lambda: 2**10)
    with pytest.raises(ValueError, match="the weights of 3 workers need"):
        check_before_fetching(CONFIG, model_dir)
    (model_dir / "config.json").write_text(json.dumps(TINY_LLAMA | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match="architecture 'GPT2LMHeadModel' is not supported"):
        check_before_fetching(CONFIG, model_dir)


def test_a_page_store_and_the_pools_fit_together(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, num_pages=64, max_model_len=16)
    needed = 3 * (
        num_pool_bytes(config.engine(""), page_layout_of(ModelConfig.from_dir(model_dir), 16, "float32", "auto"))
        + num_weight_bytes(config.engine(""), ModelConfig.from_dir(model_dir))
    )
    stored = replace(config, store_memory="64MiB")

    def check(config: ClusterConfig, available: int) -> None:
        monkeypatch.setattr("tandem.deploy.plan.available_memory_bytes", lambda: available)
        plan(config, model_dir, "", PORTS)
        check_before_fetching(config, model_dir)

    check(config, needed)
    check(stored, needed + 2**26)
    with pytest.raises(ValueError, match=r"3 pools of 64 pages .* use a num_pages of at most 6[0-3]"):
        check(stored, needed + 2**26 - 1)
    with pytest.raises(ValueError, match=r"^store_memory is 0\.06 GiB, but only 0\.03 GiB of memory are free: use a"):
        check(stored, 2**25)
    with pytest.raises(ValueError, match=r"^store_memory 1KiB holds no page of \d+ bytes: use a larger store_memory$"):
        check(replace(config, store_memory="1KiB"), 2**40)
    # Beside a running store, an added worker needs its own memory and what the store has not touched.
    untouched = 2**20
    monkeypatch.setattr("tandem.deploy.plan.available_memory_bytes", lambda: needed // 3 + untouched)
    plan(stored, model_dir, "", PORTS, num_running=2, untouched_bytes=untouched)
    with pytest.raises(ValueError, match=r"a pool of 64 pages .* use a num_pages of at most 63"):
        plan(stored, model_dir, "", PORTS, num_running=2, untouched_bytes=untouched + 1)
    with pytest.raises(
        ValueError, match=r"^store_disk /d:64KiB is too small for pages of \d+ bytes: use a larger size$"
    ):
        check(replace(stored, store_disk="/d:64KiB"), 2**40)


def test_each_node_has_memory_for_its_page_store(model_dir: Path, pool_bytes: int) -> None:
    weight_bytes = num_weight_bytes(CONFIG.engine(""), ModelConfig.from_dir(model_dir))
    needed = pool_bytes + weight_bytes
    stored = replace(CONFIG, store_memory="64MiB")
    plan(stored, model_dir, "", PORTS, nodes=Nodes(needed + 2**26, 2 * needed + 2**26))
    with pytest.raises(ValueError, match=r"^node 10\.0\.0\.2: 2 pools of"):
        plan(stored, model_dir, "", PORTS, nodes=Nodes(9 * needed + 2**26, 2 * needed + 2**26 - 1))
    with pytest.raises(ValueError, match=r"^node 10\.0\.0\.1: store_memory is 0\.06 GiB, but only"):
        plan(stored, model_dir, "", PORTS, nodes=Nodes(2**26 - 1, 9 * needed + 2**26))


def test_a_worker_that_is_added_looks_itself(model_dir: Path, pool_bytes: int) -> None:
    plan(CONFIG, model_dir, "", PORTS, num_running=2, nodes=Nodes(0, 0))


@pytest.mark.parametrize(("configured", "threads"), [(0, [4, 2, 2]), (3, [3, 3, 3])])
def test_threads_are_those_of_each_workers_node(
    configured: int, threads: list[int], model_dir: Path, pool_bytes: int
) -> None:
    config = ClusterConfig("m", num_prefill=1, num_decode=2, num_threads=configured)
    _, workers = plan(config, model_dir, "", PORTS, nodes=Nodes(2**60, 2**60))
    assert [worker.worker.engine.num_threads for worker in workers] == threads


def test_more_threads_than_a_node_has_cpus_are_refused() -> None:
    config = ClusterConfig("m", num_threads=9)
    check_num_threads(config, 9, "node 10.0.0.1")
    with pytest.raises(
        ValueError, match=r"^num_threads is 9, but node 10\.0\.0\.1 has 8 CPUs for the cluster: use a num"
    ):
        check_num_threads(config, 8, "node 10.0.0.1")


def test_models_that_cannot_be_cut_are_refused_before_a_start(model_dir: Path) -> None:
    heads = ModelConfig.from_dir(model_dir).num_q_heads
    config = replace(CONFIG, num_pages=64, decode_tp=3 if heads % 3 else 5)
    with pytest.raises(ValueError, match=rf"^{config.decode_tp} ranks cannot share the model's query heads, {heads}: "):
        check_before_fetching(config, model_dir)
    with pytest.raises(ValueError, match="ranks cannot share"):
        plan(config, model_dir, "", PORTS)


def test_threads_and_memory_of_workers_are_their_ranks(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    (model_dir / "config.json").write_text(json.dumps(TINY_LLAMA | heads))
    config = replace(CONFIG, num_pages=64, tp=2, prefill_tp=4)
    _, workers = plan(config, model_dir, "", PORTS)
    assert [(w.worker.engine.degree, w.worker.engine.num_threads) for w in workers] == [(4, 2), (2, 2), (2, 2)]
    model = ModelConfig.from_dir(model_dir)
    copies = 4 // 2
    layout = page_layout_of(model, 16, "float32", "auto")
    weights = num_weight_bytes(config.engine(""), model)
    # Of pages that hold each head more than once.
    needed = 3 * (weights + copies * num_pool_bytes(config.engine(""), layout))
    nodes = Nodes(2**40, 0)
    nodes._pools = [PoolsOfNode("10.0.0.1", 3, needed - 1)]
    with pytest.raises(ValueError, match="3 pools of 64 pages"):
        plan(config, model_dir, "", PORTS, nodes=nodes)
    nodes._pools = [PoolsOfNode("10.0.0.1", 3, needed)]
    plan(config, model_dir, "", PORTS, nodes=nodes)
