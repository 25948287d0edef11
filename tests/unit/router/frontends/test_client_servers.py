"""Routers that share the clients' ports."""

import contextlib
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tandem.deploy.host.ports import ReservedPorts
from tandem.router import process
from tandem.router.config import RouterConfig, port_of
from tandem.router.process import RouterProcess
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def shared() -> Iterator[tuple[int, int]]:
    """Yields gRPC and HTTP ports that are held for the routers."""
    ports = ReservedPorts()
    yield port_of(ports.reserve("127.0.0.1", 0, "grpc_port")), port_of(ports.reserve("127.0.0.1", 0, "http_port"))
    ports.close()


@contextlib.contextmanager
def router(model_dir: Path, shared: tuple[int, int], name: str) -> Iterator[RouterProcess]:
    grpc_port, http_port = shared
    config = RouterConfig(
        str(model_dir),
        name,
        64,
        grpc_port=0,
        http_port=0,
        shared_grpc_port=grpc_port,
        shared_http_port=http_port,
        reuse_ports=True,
    )
    router = RouterProcess(config)
    router.addresses = router.start()  # type: ignore[attr-defined]
    try:
        yield router
    finally:
        router.stop()


def names_at(grpc_port: int, num_connections: int = 40) -> set[str]:
    """Returns the names of the routers at a port; each has its own model name here."""
    names = set()
    for _ in range(num_connections):
        # Otherwise a channel may go on with the connection of one that is still closing.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            names.add(stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5.0, wait_for_ready=True).model)
    return names


def test_each_has_its_own_ports_and_takes_its_share_of_common_ones(
    router_model_dir: Path, shared: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SHARED_PORTS_TIMEOUT_S", 0.1)
    with contextlib.ExitStack() as first, router(router_model_dir, shared, "two") as two:
        one = first.enter_context(router(router_model_dir, shared, "one"))
        for each, name in ((one, "one"), (two, "two")):
            assert names_at(port_of(each.addresses.grpc), 3) == {name}  # type: ignore[attr-defined]
        with grpc.insecure_channel(f"127.0.0.1:{shared[0]}") as channel, pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=0.2)
        one.open_shared_ports()
        assert names_at(shared[0], 5) == {"one"}
        two.open_shared_ports()
        assert names_at(shared[0]) == {"one", "two"}
        assert OPENER.open(f"http://127.0.0.1:{shared[1]}/health", timeout=5.0).status == 200
        first.close()
        assert names_at(shared[0], 10) == {"two"}
        with router(router_model_dir, shared, "again") as again:
            again.open_shared_ports()
            assert names_at(shared[0]) == {"two", "again"}


def test_a_loop_that_stands_still_does_not_answer_a_probe(
    router_model_dir: Path, shared: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PROBE_TIMEOUT_S", 0.3)
    with router(router_model_dir, shared, "one") as one:
        one.probe()
        stuck = threading.Event()
        assert one._loop_thread.loop is not None
        one._loop_thread.loop.call_soon_threadsafe(stuck.wait, 10.0)
        with pytest.raises(TimeoutError):
            one.probe()
        stuck.set()
