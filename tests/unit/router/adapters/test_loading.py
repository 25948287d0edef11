"""Loads and unloads of adapters at a router."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tandem.messages import AdapterChecked, CheckAdapter
from tandem.router.adapters.loading import AdapterLoading
from tandem.router.adapters.names import AdapterNames
from tandem.router.errors import InvalidRequestError, UnavailableError, UnknownModelError
from tandem.router.workers.worker import Worker
from tandem.router.workers.worker_registry import WorkerRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_adapters import make_ref
from tests.fakes.scripted_worker import hello


class Cluster:
    """A router's loading, with workers that answer each check at once."""

    def __init__(self) -> None:
        self.names = AdapterNames("r0")
        self.registry = WorkerRegistry(FakeClock(), 3.0, 60.0)
        self.loading = AdapterLoading(self.names, self.registry, ("base",))
        self.asked: list[str] = []

    def add(self, name: str, host: str, **answer: Any) -> Worker:
        def send(messages: Any) -> None:
            for message in messages:
                if isinstance(message, CheckAdapter) and answer:
                    self.asked.append(name)
                    self.loading.receive(worker, AdapterChecked(message.check_id, **answer))

        worker = self.registry.register(hello(name, "prefill", host=host), send, lambda _: None)
        return worker


def run(task: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(10.0):
            return await task

    return asyncio.run(limited())


def test_a_worker_of_each_host_checks_the_adapter() -> None:
    cluster = Cluster()
    for name, host in (("p-0", "h1"), ("p-1", "h1"), ("p-2", "h2")):
        cluster.add(name, host, adapter=make_ref("one"))
    assert run(cluster.loading.load("a", "path")) == make_ref("one") == cluster.names.find("a")
    assert len(cluster.asked) == 2
    run(cluster.loading.unload("a"))
    assert cluster.names.find("a") is None


def test_hosts_that_see_other_files_refuse_it() -> None:
    cluster = Cluster()
    cluster.add("p-0", "h1", adapter=make_ref("one"))
    cluster.add("p-1", "h2", adapter=make_ref("two"))
    with pytest.raises(InvalidRequestError, match="different adapters on different hosts"):
        run(cluster.loading.load("a", "path"))
    cluster = Cluster()
    cluster.add("p-0", "h1", adapter=make_ref("one"))
    cluster.add("p-1", "h2", adapter=None, refusal="it is not there")
    with pytest.raises(InvalidRequestError, match="cannot be served at p-1: it is not there"):
        run(cluster.loading.load("a", "path"))
    assert not cluster.names.loaded()


def test_another_content_needs_in_place() -> None:
    cluster = Cluster()
    cluster.names.change("a", make_ref("old"))
    cluster.add("p-0", "h1", adapter=make_ref("new"))
    with pytest.raises(InvalidRequestError, match="'a' is loaded with another content, from /adapters/old"):
        run(cluster.loading.load("a", "path"))
    run(cluster.loading.load("a", "path", in_place=True))
    assert cluster.names.find("a") == make_ref("new")


def test_names_and_paths_are_checked_before_any_worker_is_asked() -> None:
    cluster = Cluster()
    cluster.add("p-0", "h1", adapter=make_ref("one"))
    for name, path, param in (("base", "p", "lora_name"), ("", "p", "lora_name"), ("a", "", "lora_path")):
        with pytest.raises(InvalidRequestError) as refused:
            run(cluster.loading.load(name, path))
        assert refused.value.param == param
    assert not cluster.asked
    with pytest.raises(UnknownModelError, match="no adapter 'a' is loaded"):
        run(cluster.loading.unload("a"))


def test_without_an_answer_there_is_no_load() -> None:
    cluster = Cluster()
    with pytest.raises(UnavailableError, match="no worker is connected"):
        run(cluster.loading.load("a", "path"))
    worker = cluster.add("p-0", "h1")

    async def lose() -> None:
        load = asyncio.create_task(cluster.loading.load("a", "path"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cluster.loading.lose_worker(worker)
        await load

    with pytest.raises(UnavailableError, match="worker p-0 was lost"):
        run(lose())
    assert not cluster.names.loaded()
