"""A scripted store and real routers over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tandem.messages import PROTOCOL_VERSION, Peer, RepeatPrefixes, StoreJoin
from tandem.page_changes import PageChangeLog, PageChanges
from tandem.pagestore.messages import DISK, HOST, Purge
from tandem.pagestore.server import router_feed
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.router_feed import PART_IDENTITIES, RouterFeed
from tandem.router.config import RouterConfig
from tandem.router.policies.base import RoutingPolicy
from tandem.router.policies.least_cost import LeastCost
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.router.store_reports import StoreReports
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2_grpc
from tests.fakes.clock import FakeClock
from tests.fakes.link_ends import wait_until
from tests.fakes.router_harness import run
from tests.fakes.store_client import StoreClient, identity

TOKEN = "a token"
JOIN = StoreJoin(PROTOCOL_VERSION, "store-0", "epoch", "host")


class ScriptedStore:
    def __init__(self) -> None:
        self._logs = {HOST: PageChangeLog(), DISK: PageChangeLog()}
        self.held: dict[int, set[int]] = {HOST: set(), DISK: set()}

    def store(self, tier: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.held[tier].add(number)
            self._logs[tier].store(number.to_bytes(8, "little"))

    def remove(self, tier: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.held[tier].remove(number)
            self._logs[tier].remove(number.to_bytes(8, "little"))

    def take_changes(self) -> Mapping[int, PageChanges]:
        taken = {tier: log.take() for tier, log in self._logs.items()}
        return {tier: changes for tier, changes in taken.items() if any(changes)}

    def is_known_to(self, router: Router) -> bool:
        prefixes = router.stores.node("host").prefixes
        return prefixes is not None and all(
            len(known) == len(held) and all(number in known for number in held)
            for known, held in zip(prefixes.tiers, self.held.values(), strict=True)
        )


class RouterPort:
    """A router on an address that outlives it."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self._policy = policy
        self._port = 0
        self.address = ""

    async def start(self) -> Router:
        self.router = Router(RouterConfig("nowhere", "fake", 400), self._policy or LeastCost())
        self._node = self.router.stores.node("host")
        self._server = new_server([cluster_auth(TOKEN)])
        store_pb2_grpc.add_StoreReportsServicer_to_server(StoreReports(self.router), self._server)
        self.address = bind(self._server, "127.0.0.1", self._port)
        self._port = int(self.address.rpartition(":")[2])
        await self._server.start()
        return self.router

    async def stop(self) -> None:
        await self._server.stop(grace=0.0)


@asynccontextmanager
async def fed(store: ScriptedStore, *ports: RouterPort, token: str = TOKEN) -> AsyncIterator[None]:
    addresses = [port.address for port in ports]
    task = asyncio.create_task(RouterFeed(addresses, JOIN, ClusterCredentials(token), store.take_changes).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@run
async def test_a_router_s_reset_is_answered_once_it_is_done() -> None:
    port, purges, is_done = RouterPort(), [0], asyncio.Event()
    router = await port.start()

    async def purge() -> None:
        purges[0] += 1
        await is_done.wait()

    feed = RouterFeed([port.address], JOIN, ClusterCredentials(TOKEN), ScriptedStore().take_changes, purge=purge)
    task = asyncio.create_task(feed.run())
    await wait_until(lambda: bool(list(router.stores)))
    router.reset_caches()
    await wait_until(lambda: purges == [1])
    for is_answered in (False, True):
        (store,) = router.stores
        router.stores.lose(store, "its stream broke")
        await wait_until(lambda: bool(list(router.stores)))
        if is_answered:
            await asyncio.sleep(0.05)
            assert purges == [2], "an answered reset is not repeated"
        else:
            await wait_until(lambda: purges == [2])
            is_done.set()
            await wait_until(lambda: router.stores._resets_done == {"store-0": 1})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await port.stop()


@run
async def test_routers_know_each_tier_also_after_a_restart() -> None:
    store, ports = ScriptedStore(), [RouterPort(), RouterPort()]
    for port in ports:
        await port.start()
    store.store(HOST, range(3 * PART_IDENTITIES))
    async with fed(store, *ports):
        for port in ports:
            await wait_until(lambda router=port.router: store.is_known_to(router))
        store.store(DISK, range(PART_IDENTITIES, 2 * PART_IDENTITIES))
        store.remove(HOST, range(PART_IDENTITIES, 3 * PART_IDENTITIES))
        await wait_until(lambda: all(store.is_known_to(port.router) for port in ports))
        await ports[0].stop()
        store.remove(DISK, range(PART_IDENTITIES, PART_IDENTITIES + 7))
        await wait_until(lambda: store.is_known_to(ports[1].router))
        await ports[0].start()
        await wait_until(lambda: store.is_known_to(ports[0].router))
    await wait_until(lambda: all(not list(port.router.stores) for port in ports))
    for port in ports:
        await port.stop()


@run
async def test_a_router_that_missed_a_report_gets_everything_again() -> None:
    store, port = ScriptedStore(), RouterPort()
    await port.start()
    store.store(HOST, range(10))
    async with fed(store, port):
        await wait_until(lambda: store.is_known_to(port.router))
        (connected,) = port.router.stores
        # As if a report had been lost.
        connected.prefixes._next_number += 1
        store.store(DISK, range(5))
        await wait_until(lambda: store.is_known_to(port.router))
        connected.send([RepeatPrefixes()])
        store.remove(HOST, range(9))
        await wait_until(lambda: store.is_known_to(port.router))
    await port.stop()


@run
async def test_a_policy_without_prefixes_gets_no_reports() -> None:
    store, port = ScriptedStore(), RouterPort(LeastLoaded())
    router = await port.start()
    store.store(HOST, range(10))
    async with fed(store, port):
        await wait_until(lambda: len(list(router.stores)) == 1)
        (connected,) = router.stores
        heard = connected.last_heard
        await wait_until(lambda: connected.last_heard > heard)
        assert len(connected.prefixes) == 0
        assert store.take_changes() == {}
    await port.stop()


@run
async def test_a_stranger_is_not_heard() -> None:
    store, port = ScriptedStore(), RouterPort()
    router = await port.start()
    async with fed(store, port, token="another"):
        await asyncio.sleep(3 * router_feed.RETRY_DELAY_S)
        assert not list(router.stores)
    await port.stop()


@run
async def test_an_unexpected_message_ends_the_stream_and_it_opens_again() -> None:
    store, port = ScriptedStore(), RouterPort()
    router = await port.start()
    async with fed(store, port):
        await wait_until(lambda: len(list(router.stores)) == 1)
        (first,) = router.stores
        message: Any = port.router.clocks.probe()
        first.send([message])
        await wait_until(lambda: [store for store in router.stores if store is not first] != [])
    await port.stop()


@run
async def test_a_real_store_is_known() -> None:
    port = RouterPort()
    router = await port.start()
    store = PageStore(4, FakeClock())
    client = StoreClient(store)
    task = asyncio.create_task(RouterFeed([port.address], JOIN, ClusterCredentials(TOKEN), store.take_changes).run())

    def known(name: str) -> bool:
        prefixes = router.stores.node("host").prefixes
        return prefixes is not None and int.from_bytes(identity(name), "little") in prefixes.tiers[HOST]

    (a, b) = client.put(["a", "b"])
    client.wrote([a])
    await wait_until(lambda: known("a"))
    assert not known("b")
    client.wrote([b])
    await wait_until(lambda: known("b"))
    store.receive(client.session, Purge())
    await wait_until(lambda: not known("a") and not known("b"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await port.stop()


@run
async def test_stores_know_the_others_that_any_router_names() -> None:
    ports = [RouterPort(), RouterPort()]
    for port in ports:
        await port.start()
    named: dict[str, Sequence[Peer]] = {}

    def feed(name: str, *to: RouterPort) -> RouterFeed:
        join = StoreJoin(PROTOCOL_VERSION, name, f"life of {name}", name, address=f"{name}:1")
        addresses = [port.address for port in to]
        store = ScriptedStore()
        return RouterFeed(
            addresses,
            join,
            ClusterCredentials(TOKEN),
            store.take_changes,
            on_peers=lambda peers: named.update({name: peers}),
        )

    feeds = (feed("a", *ports), feed("b", ports[0]), feed("c", ports[1]))
    tasks = [asyncio.create_task(one.run()) for one in feeds]
    try:
        await wait_until(lambda: len(named.get("a", ())) == 2)
        assert {peer.worker_id for peer in named["a"]} == {"b", "c"}
        assert list(named["b"]) == list(named["c"]) == [Peer("a", "life of a", "a:1")]
        # A lost router removes nobody at once.
        await ports[0].stop()
        await wait_until(lambda: not list(ports[0].router.stores))
        await asyncio.sleep(3 * router_feed.INTERVAL_S)
        assert len(named["a"]) == 2
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
