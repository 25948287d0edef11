"""Pages from memory and disk give transformers' greedy tokens, whatever dies, and never those of another key."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.client import TandemClient
from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import API_KEYS, Clusters, Oracle, ServedCluster, save_tiny_model
from tests.cluster.conversations import STORE, TIMEOUT_S, Conversations, Hits, load_at_any_cost, wait_store
from tests.cluster.faults import QuickConfig

# A pool holds three conversations of up to 15 pages.
MAX_MODEL_LEN = 256
NUM_PAGES = 48
FIRST_TOKENS = (80, 120)
NUM_TURNS = 4
# Of 8 KiB each: the memory holds a third of the conversations of each test, the disk all.
PAGE_BYTES = 8192
NUM_QUICK = 24
NUM_CONVERSATIONS = 200
DISK_BYTES = "256MiB"
# Layers so wide that computing takes longer than loading.
WIDTH = 16384
LAYOUTS: dict[str, dict[str, Any]] = {
    "1p1d": {"num_prefill": 1, "num_decode": 1},
    "2p2d": {"num_prefill": 2, "num_decode": 2},
    "workers": {"num_prefill": 0, "num_decode": 0, "num_any": 2},
}
WORKERS = {
    "1p1d": ("prefill-0", "decode-0"),
    "2p2d": ("prefill-1", "decode-0"),
    "workers": ("worker-0", "worker-1"),
}


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "wide-llama"
    save_tiny_model(directory, intermediate_size=WIDTH)
    return directory


@pytest.fixture(scope="module")
def oracle(wide_model_dir: Path) -> Oracle:
    return Oracle(wide_model_dir)


def config_for(model_dir: Path, disk: Path, num_conversations: int, **options: Any) -> ClusterConfig:
    num_slots = num_conversations * 12 // 3
    quick = QuickConfig(
        model=str(model_dir),
        num_pages=NUM_PAGES,
        max_model_len=MAX_MODEL_LEN,
        chunk_size=64,
        num_threads=1,
        grpc_port=0,
        http_port=0,
        store_memory=f"{num_slots * PAGE_BYTES // 1024}KiB",
        store_disk=f"{disk}:{DISK_BYTES}",
    )
    return replace(quick, **options)


def assert_mostly_loaded(turns: Sequence[Hits]) -> None:
    for turn in turns:
        assert turn.share > 0.5, turns


# --- the quick part -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "disk"


@pytest.fixture
def stored(clusters: Clusters, wide_model_dir: Path, disk: Path) -> ServedCluster:
    served = clusters.get(config_for(wide_model_dir, disk, NUM_QUICK, api_keys=API_KEYS))
    wait_store(served)
    load_at_any_cost(served)
    return served


def test_conversations_beyond_pool_and_memory_are_greedy(stored: ServedCluster, oracle: Oracle) -> None:
    conversations = Conversations(1, NUM_QUICK, FIRST_TOKENS, num_threads=6)
    hits = [conversations.turn(stored) for _ in range(NUM_TURNS - 1)]
    hits[-1] += conversations.turn(stored, {NUM_QUICK: [STORE]})
    conversations.assert_greedy(oracle)
    assert hits[0].share == 0.0
    assert_mostly_loaded(hits[1:])
    assert all(min(turn.host, turn.disk) > 0 for turn in hits[1:]), hits
    wait_store(stored)
    stored.wait_clean()


def test_keys_never_share(stored: ServedCluster, oracle: Oracle) -> None:
    """The same conversations for two keys: the second finds nothing of the first's."""
    for hits in turns_of_keys(stored, 2, num_conversations=8, num_turns=2):
        assert hits[0] == Hits(prompt=hits[0].prompt), hits
        assert_mostly_loaded(hits[1:])


def turns_of_keys(served: ServedCluster, seed: int, num_conversations: int, num_turns: int) -> list[list[Hits]]:
    """Return the hits of each key's turns, the keys one after the other in each turn."""
    every = [Conversations(seed, num_conversations, FIRST_TOKENS, num_threads=4) for _ in API_KEYS]
    hits: list[list[Hits]] = [[] for _ in API_KEYS]
    with ExitStack() as stack:
        clients = [stack.enter_context(TandemClient(served.cluster.addresses.grpc, key)) for key in API_KEYS]
        for _ in range(num_turns):
            for client, conversations, own in zip(clients, every, hits, strict=True):
                own.append(conversations.turn(served, client=client))
    first, second = ([c.answers for c in conversations.conversations] for conversations in every)
    assert first == second
    return hits


# --- all of it ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_200_conversations_through_deaths_and_a_restart(
    clusters: Clusters, wide_model_dir: Path, oracle: Oracle, layout: str, tmp_path: Path
) -> None:
    config = config_for(wide_model_dir, tmp_path / "disk", NUM_CONVERSATIONS, **LAYOUTS[layout])
    served = clusters.get(config)
    wait_store(served)
    one, other = WORKERS[layout]
    conversations = Conversations(5, NUM_CONVERSATIONS, FIRST_TOKENS, num_threads=8)
    hits = [conversations.turn(served, {120: [one]})]
    hits.append(conversations.turn(served, {60: [STORE], 140: [other]}))
    wait_store(served)
    served.wait_clean(TIMEOUT_S)
    clusters.close()
    served = clusters.get(config)
    wait_store(served)
    hits.append(conversations.turn(served, {150: [one]}))
    hits.append(conversations.turn(served, {50: [other], 100: [STORE], 150: [one, other]}))
    print(layout, *hits, sep="\n")
    conversations.assert_greedy(oracle)
    wait_store(served)
    served.wait_clean(TIMEOUT_S)
    assert hits[0].share == 0.0
    assert min(turn.host for turn in hits[1:]) > 0 and min(turn.disk for turn in hits[1:]) > 0, hits
    # Memory was empty after the restart, so everything came from the disk. A page that another worker had read before
    # counts as memory's.
    assert hits[2].share > 0.4 and hits[2].disk > hits[2].prompt / 10, hits


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keys_never_share_a_disk(clusters: Clusters, wide_model_dir: Path, tmp_path: Path) -> None:
    """The first key's pages of an earlier life of the cluster are only the first key's."""
    config = config_for(wide_model_dir, tmp_path / "disk", NUM_QUICK, api_keys=API_KEYS)
    served = clusters.get(config)
    wait_store(served)
    conversations = Conversations(7, NUM_QUICK, FIRST_TOKENS, num_threads=6)
    conversations.turn(served)
    wait_store(served)
    clusters.close()
    served = clusters.get(config)
    wait_store(served)
    again = Conversations(7, NUM_QUICK, FIRST_TOKENS, num_threads=6)
    with TandemClient(served.cluster.addresses.grpc, API_KEYS[1]) as second:
        of_second = again.turn(served, client=second)
    assert of_second == Hits(prompt=of_second.prompt)
    of_first = conversations.turn(served)
    print(of_first)
    assert of_first.share > 0.5 and of_first.disk > of_first.prompt / 10 and of_first.pool == 0
