"""A store process within this one, over a real region."""

import asyncio
import errno
import itertools
import os
import queue
import re
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tandem.exit_watch import SETTLE_S
from tandem.hosts import host_id
from tandem.messages import PROTOCOL_VERSION, PageFormat
from tandem.pagestore.config import StoreConfig, StoreDisk
from tandem.pagestore.messages import (
    DISK,
    NO_ROOM,
    PEER,
    STORE_CLIENT_CODEC,
    STORE_SERVER_CODEC,
    Find,
    Found,
    Put,
    PutGranted,
    StoreClientMessage,
    StoreHello,
    StoreRefused,
    StoreServerMessage,
    StoreWelcome,
    Wrote,
)
from tandem.pagestore.region import GIB, Region
from tandem.pagestore.region_client import take_region
from tandem.pagestore.region_holder import RegionHolder
from tandem.pagestore.server import process as process_of_store
from tandem.pagestore.server.disk import opened_folder
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.process import StoreProcess
from tandem.router.config import RouterConfig
from tandem.router.errors import UnavailableError
from tandem.router.policies.least_cost import LeastCost
from tandem.router.router import Router
from tandem.router.store_reports import StoreReports
from tandem.router.workers import store_registry
from tandem.rpc.auth import cluster_auth, cluster_metadata
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import store_pb2_grpc
from tests.fakes.router_harness import run
from tests.unit.pagestore.server.test_router_feed import TOKEN as ROUTER_TOKEN
from tests.unit.pagestore.server.test_router_feed import RouterPort
from tests.unit.pagestore.server.test_server import Client
from tests.unit.pagestore.test_region_holder import TOKEN, begin, other_process

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


def hello_of(
    config: StoreConfig, worker: str, pid: int, page_bytes: int = PAGE_BYTES, follower_pids: tuple[int, ...] = ()
) -> StoreHello:
    taken = take_region(Path(config.region_socket), config.cluster_token)
    taken.region.close()
    page_format = PageFormat("model", page_bytes, "fake")
    return StoreHello(PROTOCOL_VERSION, "w", worker, pid, page_format, 0, taken.region_id, follower_pids)


def answers(
    config: StoreConfig,
    pid: int,
    *,
    num_answers: int,
    page_bytes: int = PAGE_BYTES,
    follower_pids: tuple[int, ...] = (),
) -> list[object]:
    """Returns the first answers to a session that offers a page."""
    hello = hello_of(config, f"life {pid}", pid, page_bytes, follower_pids)
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
    with other_process(Path(config.region_socket), "user") as user, running(config):
        assert answers(config, 1, num_answers=2)[1].slots == (NO_ROOM,)  # type: ignore[attr-defined]
        assert answers(config, user.pid, num_answers=2)[1].slots == (0,)  # type: ignore[attr-defined]


def test_a_leader_speaks_for_its_followers(config: StoreConfig) -> None:
    with other_process(Path(config.region_socket), "user") as follower, running(config):
        assert answers(config, 1, num_answers=2)[1].slots == (NO_ROOM,)  # type: ignore[attr-defined]
        found = answers(config, 1, num_answers=2, follower_pids=(follower.pid,))
        assert found[1].slots == (0,)  # type: ignore[attr-defined]


def test_slots_of_a_worker_return_once_all_its_ranks_are_gone(config: StoreConfig, process: StoreProcess) -> None:
    """A follower may still copy when its leader has exited."""
    path = Path(config.region_socket)

    def num_writing() -> int:
        stats = process._sessions.latest_stats
        return stats.num_writing if stats is not None else 0

    with other_process(path, "mapper") as leader, other_process(path, "mapper") as follower:
        answers(config, leader.pid, num_answers=2, follower_pids=(follower.pid,))
        wait_until(lambda: num_writing() == 1)
        leader.kill()
        leader.wait()
        time.sleep(SETTLE_S + 0.1)
        assert num_writing() == 1
        follower.kill()
        follower.wait()
        wait_until(lambda: num_writing() == 0)


def test_a_worker_that_is_starting_delays_nobody(config: StoreConfig) -> None:
    with other_process(Path(config.region_socket), "mapper"), running(config):
        assert answers(config, 1, num_answers=2)[1].slots == (0,)  # type: ignore[attr-defined]


def test_a_worker_that_begins_with_an_earlier_store_is_a_former_user(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_of_store, "EARLIER_STORES_S", 0.0)
    path = Path(config.region_socket)
    with other_process(path, "store") as store, other_process(path, "mapper") as worker, running(config):
        (refused,) = answers(config, 1, num_answers=1)
        assert isinstance(refused, StoreRefused)
        assert refused.reason == "an earlier page store of this node has not ended yet"
        # The users that the new store has read lack it.
        begin(worker)
        store.kill()
        wait_until(lambda: isinstance(answers(config, 1, num_answers=1)[0], StoreWelcome))
        assert answers(config, 1, num_answers=2)[1].slots == (NO_ROOM,)  # type: ignore[attr-defined]
        assert answers(config, worker.pid, num_answers=2)[1].slots == (0,)  # type: ignore[attr-defined]


def test_a_killed_store_s_successor_begins_once_its_copies_have_settled(config: StoreConfig) -> None:
    with other_process(Path(config.region_socket), "store") as store:
        store.kill()
        store.wait()
        with running(config):
            assert isinstance(answers(config, 1, num_answers=1)[0], StoreWelcome)


def test_a_key_has_its_share_of_the_memory(config: StoreConfig) -> None:
    # One of three slots.
    with running(replace(config, namespace_share=0.34)) as process, session(config) as (send, answer):
        for number, namespace in enumerate(("key/a", "key/b", "other/a")):
            send(replace(PUT, number=number, namespace=namespace, keys=(bytes([number]) * 32,)))
            granted = answer()
            assert isinstance(granted, PutGranted)
            # The slot of the first key is being written.
            assert (granted.slots == (NO_ROOM,)) == (number == 1)
        process.probe()


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


def metrics_of(process: StoreProcess) -> dict[str, float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{process.metrics_address}/metrics", timeout=10.0) as answer:
        lines = re.findall(r"^tandem_store_(\w+)\{(.*)\} (.*)$", answer.read().decode(), re.MULTILINE)
    return {".".join([name, *re.findall(r'"(?!store-0)(\w+)"', labels)]): float(value) for name, labels, value in lines}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def running(config: StoreConfig) -> Iterator[StoreProcess]:
    process = StoreProcess(config)
    process.start()
    try:
        yield process
    finally:
        process.stop()


Send = Callable[[StoreClientMessage], None]
Answer = Callable[[], StoreServerMessage]


@contextmanager
def session(config: StoreConfig) -> Iterator[tuple[Send, Answer]]:
    messages: queue.SimpleQueue[StoreClientMessage | None] = queue.SimpleQueue()
    messages.put(hello_of(config, "life", os.getpid()))
    with grpc.insecure_channel(f"{config.host}:{config.port}") as channel:
        batches = (STORE_CLIENT_CODEC.encode([message]) for message in iter(messages.get, None) if message)
        call = store_pb2_grpc.PageStoreStub(channel).Session(batches, metadata=cluster_metadata(TOKEN), timeout=20.0)
        received = (message for batch in call for message in STORE_SERVER_CODEC.decode(batch))
        assert isinstance(next(received), StoreWelcome)
        yield messages.put, lambda: next(received)
        messages.put(None)
        call.cancel()


def new_disk(folder: Path) -> StoreDisk:
    Folder(folder).close()
    return StoreDisk(str(folder), 2**20)


def leave_a_page_on_disk(config: StoreConfig) -> None:
    with running(config) as process, session(config) as (send, answer):
        send(PUT)
        granted = answer()
        assert isinstance(granted, PutGranted)
        send(Wrote(granted.slots, granted.generations))
        wait_until(lambda: metrics_of(process).get("disk_pages") == 1)


def assert_page_is_gone(config: StoreConfig, process: StoreProcess) -> None:
    with session(config) as (send, answer):
        assert process._disk is not None
        wait_until(lambda: process._disk.is_loaded)  # type: ignore[union-attr]
        send(Find(2, PUT.keys))
        found = answer()
        assert isinstance(found, Found) and (found.slots, found.num_coming) == ((), 0)


@pytest.mark.parametrize("folder", ["mount", "mount/disk"])
def test_a_store_whose_disk_is_unmounted_serves_from_memory(config: StoreConfig, tmp_path: Path, folder: str) -> None:
    (tmp_path / "mount").mkdir(mode=0o755)
    config = replace(config, disk=StoreDisk(str(tmp_path / folder), 2**20))
    with running(config) as process, session(config) as (send, answer):
        send(PUT)
        granted = answer()
        assert isinstance(granted, PutGranted) and granted.slots == (0,)
        wait_until(lambda: metrics_of(process).get("disk_up") == 0)
    assert list((tmp_path / "mount").iterdir()) == []


def test_pages_on_disk_outlive_the_store_and_its_memory(config: StoreConfig, tmp_path: Path) -> None:
    config = replace(config, disk=new_disk(tmp_path / "disk"))
    region = take_region(Path(config.region_socket), TOKEN).region.map()
    with running(config) as process, session(config) as (send, answer):
        send(PUT)
        granted = answer()
        assert isinstance(granted, PutGranted)
        region[:PAGE_BYTES] = b"x" * PAGE_BYTES
        send(Wrote(granted.slots, granted.generations))
        wait_until(lambda: metrics_of(process).get("disk_pages") == 1)
    region[:PAGE_BYTES] = bytes(PAGE_BYTES)
    with running(config) as process, session(config) as (send, answer):
        wait_until(lambda: metrics_of(process).get("disk_pages") == 1)
        send(Find(2, PUT.keys))
        found = answer()
        assert isinstance(found, Found) and (found.slots, found.num_coming) == ((), 1)
        found = answer()
        assert isinstance(found, Found) and (found.tiers, found.num_coming) == ((DISK,), 0)
        start = found.slots[0] * PAGE_BYTES
        assert region[start : start + PAGE_BYTES] == b"x" * PAGE_BYTES
        metrics = metrics_of(process)
        for name in ("disk_up", "disk_moved_pages_total.read", "hit_pages_total.disk"):
            assert metrics[name] == 1


def test_reads_of_the_disk_are_answered_before_the_next_poll(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, disk=new_disk(tmp_path / "disk"))
    leave_a_page_on_disk(config)
    monkeypatch.setattr(process_of_store, "POLL_INTERVAL_S", 3600.0)
    with running(config) as process, session(config) as (send, answer):
        wait_until(lambda: process._disk is not None and process._disk.stats().num_pages == 1)
        send(Find(2, PUT.keys))
        for num_coming in (1, 0):
            found = answer()
            assert isinstance(found, Found) and found.num_coming == num_coming


def test_a_store_whose_folder_is_in_use_serves_from_memory(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opened_folder, "IN_USE_LIMIT_S", 0.05)
    config = replace(config, disk=new_disk(tmp_path / "disk"))
    folder = Folder(tmp_path / "disk")
    with running(config) as process, session(config) as (send, answer):
        wait_until(lambda: metrics_of(process).get("disk_up") == 0)
        send(PUT)
        granted = answer()
        assert isinstance(granted, PutGranted) and granted.slots == (0,)
    folder.close()
    assert "is in use by another page store" in caplog.text


@contextmanager
def a_router() -> Iterator[tuple[Router, str]]:
    router = Router(RouterConfig("nowhere", "fake", 400), LeastCost())
    loop_thread = LoopThread()
    loop_thread.start()

    async def serve() -> tuple[grpc.aio.Server, str]:
        server = new_server([cluster_auth(TOKEN)])
        store_pb2_grpc.add_StoreReportsServicer_to_server(StoreReports(router), server)
        address = bind(server, "127.0.0.1", 0)
        await server.start()
        return server, address

    server, address = loop_thread.call(serve(), 10.0)
    try:
        yield router, address
    finally:
        loop_thread.call(server.stop(0.0), 10.0)
        loop_thread.stop()


def test_routers_learn_who_and_where_the_store_is_and_what_it_holds(config: StoreConfig) -> None:
    with (
        a_router() as (router, address),
        running(replace(config, routers=(address,), rack="r")) as process,
        session(config) as (send, answer),
    ):
        send(PUT)
        granted = answer()
        assert isinstance(granted, PutGranted)
        send(Wrote(granted.slots, granted.generations))
        wait_until(lambda: [s.beat.num_host_pages for s in router.stores] == [1])
        (store,) = router.stores
        assert store.beat.num_slots == NUM_SLOTS and len(store.prefixes) == 1
        assert (store.join.store_id, store.join.pid, store.join.rack) == ("store-0", os.getpid(), "r")
        assert store.join.host == host_id()
        assert store.join.address == f"{config.host}:{config.port}"
        assert store.join.metrics_address == process.metrics_address


@pytest.mark.parametrize("has_store", [True, False], ids=["after the last worker", "before the first worker"])
def test_a_router_s_reset_purges_memory_and_disk_without_a_worker(
    config: StoreConfig, tmp_path: Path, has_store: bool
) -> None:
    config = replace(config, disk=new_disk(tmp_path / "disk"))
    leave_a_page_on_disk(config)
    with a_router() as (router, address), running(replace(config, routers=(address,))) as process:
        if has_store:
            with session(config):
                wait_until(lambda: metrics_of(process).get("disk_pages") == 1)
        wait_until(lambda: len(list(router.stores)) == 1)
        assert router.reset_caches() == 0
        wait_until(lambda: router.stores._resets_done == {"store-0": 1})
        assert_page_is_gone(config, process)


def test_a_purge_of_a_folder_in_use_is_made_up_for(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened_folder, "IN_USE_LIMIT_S", 0.05)
    config = replace(config, disk=new_disk(tmp_path / "disk"))
    leave_a_page_on_disk(config)
    with running(config) as process:
        folder = Folder(tmp_path / "disk")
        with pytest.raises(OSError, match="is in use by another page store"):
            process._loop_thread.call(process._sessions.purge(), 10.0)
        folder.close()
        assert_page_is_gone(config, process)


def test_purges_that_wait_for_the_disk_leave_the_loop_its_threads(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(process_of_store, "purge_folder", lambda directory, secret: go_on.wait(10.0))
    with running(replace(config, disk=new_disk(tmp_path / "disk"))) as process:

        async def ask() -> None:
            purges = [asyncio.create_task(process._sessions.purge()) for _ in range(40)]
            await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.to_thread(int), 5.0)
            go_on.set()
            await asyncio.gather(*purges)

        process._loop_thread.call(ask(), 10.0)


def test_a_folder_that_is_being_purged_is_waited_for(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, disk=new_disk(tmp_path / "disk"))
    leave_a_page_on_disk(config)
    go_on, record = threading.Event(), Folder.record_purges
    monkeypatch.setattr(opened_folder, "IN_USE_LIMIT_S", 0.05)
    monkeypatch.setattr(Folder, "record_purges", lambda folder: (go_on.wait(10.0), record(folder)))
    with running(config) as process:
        purge = asyncio.run_coroutine_threadsafe(process._sessions.purge(), process._loop_thread.loop)  # type: ignore[arg-type]
        with session(config):
            wait_until(lambda: process._disk is not None)
            time.sleep(0.2)
            assert process._disk is not None and not process._disk.stats().is_off and not purge.done()
            go_on.set()
            purge.result(10.0)
        assert_page_is_gone(config, process)
        assert not process._disk.stats().is_off


@pytest.mark.parametrize("has_store", [True, False], ids=["after the last worker", "before the first worker"])
def test_a_reset_that_the_disk_cannot_keep_is_repeated_until_it_can(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    def fail(folder: Folder) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store_registry, "RESET_RETRY_S", 0.05)
    config = replace(config, disk=new_disk(tmp_path / "disk"))
    leave_a_page_on_disk(config)
    with a_router() as (router, address), running(replace(config, routers=(address,))) as process:
        if has_store:
            with session(config):
                wait_until(lambda: metrics_of(process).get("disk_pages") == 1)
        wait_until(lambda: len(list(router.stores)) == 1)
        with monkeypatch.context() as broken:
            broken.setattr(store_registry, "RESET_LIMIT_S", 0.5)
            broken.setattr(Folder, "record_purges", fail)
            broken.setattr(Folder, "drop_record", fail)
            router.reset_caches()
            wait_until(lambda: router.stores.unreset(1) == {"store-0": "Read-only file system"})
            with pytest.raises(UnavailableError, match=r"of before the reset: store-0 \(Read-only file system\)"):
                asyncio.run(router.finish_reset())
        router.reset_caches()
        router.check_deadlines()
        asyncio.run(router.finish_reset())
        assert not router.stores.unreset(1)
    with running(config) as process:
        assert_page_is_gone(config, process)


def test_routers_are_told_of_a_disk_that_is_off(config: StoreConfig, tmp_path: Path) -> None:
    with a_router() as (router, address):
        config = replace(config, routers=(address,), disk=StoreDisk(str(tmp_path / "none"), 2**20))
        with running(config), session(config):
            wait_until(lambda: [store.beat.is_disk_off for store in router.stores] == [True])


def test_a_wrong_token_gets_no_region(config: StoreConfig) -> None:
    with pytest.raises(PermissionError, match="the cluster token is wrong"):
        StoreProcess(replace(config, cluster_token="another")).start()


@run
async def test_two_stores_learn_of_each_other_from_a_router_and_share_pages() -> None:
    port = RouterPort()
    await port.start()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        regions, configs = [], []
        for number in range(2):
            region = Region.create(NUM_SLOTS * PAGE_BYTES, GIB)
            path = Path(directory) / str(number)
            stack.callback(RegionHolder(path, ROUTER_TOKEN, region).close)
            reserved = stack.enter_context(socket.socket())
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("127.0.0.1", 0))
            regions.append(region.map())
            configs.append(
                StoreConfig(
                    f"store-{number}",
                    str(path),
                    "127.0.0.1",
                    reserved.getsockname()[1],
                    routers=(port.address,),
                    cluster_token=ROUTER_TOKEN,
                )
            )
        processes = [StoreProcess(config) for config in configs]
        clients = []
        for process, config in zip(processes, configs, strict=True):
            address = await asyncio.to_thread(process.start)
            channel = open_channel(address)
            clients.append(Client(channel, ROUTER_TOKEN))
            clients[-1].send(hello_of(config, address, 1))
            await clients[-1].read()
        try:
            clients[0].send(PUT)
            granted = await clients[0].read()
            (slot,) = granted.slots
            regions[0][slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] = b"x" * PAGE_BYTES
            clients[0].send(Wrote(granted.slots, granted.generations))
            async with asyncio.timeout(20.0):
                for number in itertools.count():
                    clients[1].send(Find(number, PUT.keys))
                    answers = [await clients[1].read()]
                    while answers[-1].num_coming or answers[-1].is_asking:
                        answers.append(await clients[1].read())
                    if answers[-1].slots:
                        break
                    await asyncio.sleep(0.05)
            assert answers[-1].tiers == (PEER,)
            (slot,) = answers[-1].slots
            assert regions[1][slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] == b"x" * PAGE_BYTES
        finally:
            for process in processes:
                await asyncio.to_thread(process.stop)
            await port.stop()
