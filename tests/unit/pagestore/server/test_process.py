"""A store process within this one, over a real region."""

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tandem.messages import PROTOCOL_VERSION, PageFormat
from tandem.pagestore.config import StoreConfig
from tandem.pagestore.messages import NO_ROOM, STORE_CLIENT_CODEC, STORE_SERVER_CODEC, Put, StoreHello
from tandem.pagestore.region import GIB, Region
from tandem.pagestore.region_holder import RegionHolder
from tandem.pagestore.server.process import StoreProcess
from tandem.rpc.auth import cluster_metadata
from tandem.v1 import store_pb2_grpc
from tests.unit.pagestore.test_region_holder import OTHER_USER, TOKEN

PAGE_BYTES = 4096
NUM_SLOTS = 3
PUT = Put(1, "", b"", (b"k" * 32,), (b"identity",))


@pytest.fixture
def config(tmp_path: Path) -> Iterator[StoreConfig]:
    path = tmp_path / "region"
    holder = RegionHolder(path, TOKEN, Region.create(NUM_SLOTS * PAGE_BYTES + 1, GIB))
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield StoreConfig("store-0", str(path), "127.0.0.1", reserved.getsockname()[1], cluster_token=TOKEN)
    holder.close()


@pytest.fixture
def process(config: StoreConfig) -> Iterator[StoreProcess]:
    process = StoreProcess(config)
    assert process.start() == f"127.0.0.1:{config.port}"
    yield process
    process.stop()


def answers(config: StoreConfig, pid: int, *, num_answers: int, page_bytes: int = PAGE_BYTES) -> list[object]:
    """Returns the first answers to a session that offers a page."""
    hello = StoreHello(PROTOCOL_VERSION, "w", f"life {pid}", pid, PageFormat("model", page_bytes, "fake"))
    with grpc.insecure_channel(f"{config.host}:{config.port}") as channel:
        batches = iter([STORE_CLIENT_CODEC.encode([hello, PUT])])
        stub = store_pb2_grpc.PageStoreStub(channel)
        call = stub.Session(batches, metadata=cluster_metadata(TOKEN), timeout=10.0)
        found: list[object] = []
        for batch in call:
            found += STORE_SERVER_CODEC.decode(batch)
            if len(found) >= num_answers:
                break
        call.cancel()
        return found


def test_the_region_is_cut_into_slots_of_the_workers_pages(config: StoreConfig, process: StoreProcess) -> None:
    welcome, granted = answers(config, 1, num_answers=2)
    assert (welcome.num_slots, granted.slots) == (NUM_SLOTS, (0,))  # type: ignore[attr-defined]
    process.probe()


def test_pages_larger_than_the_region_are_refused(config: StoreConfig, process: StoreProcess) -> None:
    (refused,) = answers(config, 1, num_answers=1, page_bytes=2**20)
    assert refused.reason == "the region of 12289 bytes holds no page of 1048576"  # type: ignore[attr-defined]


def test_a_later_life_grants_nothing_before_every_former_user_has_spoken(config: StoreConfig) -> None:
    command = [sys.executable, "-c", OTHER_USER, config.region_socket, TOKEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None and user.stdout.readline() == "has it\n"
        process = StoreProcess(config)
        process.start()
        try:
            assert answers(config, 1, num_answers=2)[1].slots == (NO_ROOM,)  # type: ignore[attr-defined]
            assert answers(config, user.pid, num_answers=2)[1].slots == (0,)  # type: ignore[attr-defined]
        finally:
            process.stop()
            user.kill()


def test_metrics_are_served_to_holders_of_a_key(config: StoreConfig) -> None:
    process = StoreProcess(replace(config, api_keys=("a-key",)))
    process.start()
    try:
        request = urllib.request.Request(f"http://{process.metrics_address}/metrics")
        request.add_header("Authorization", "Bearer a-key")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10.0) as answer:
            assert b"tandem_process_restarts_total 0.0" in answer.read()
    finally:
        process.stop()


def test_a_wrong_token_gets_no_region(config: StoreConfig) -> None:
    with pytest.raises(PermissionError, match="the cluster token is wrong"):
        StoreProcess(replace(config, cluster_token="another")).start()
