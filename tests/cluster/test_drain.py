"""Stopping `tandem serve` while requests run."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.client import TandemClient, TandemError
from tandem.deploy.host.process_tree import end_processes
from tandem.v1 import inference_pb2 as pb
from tests.cluster.command import GONE_S, Server, start
from tests.cluster.conftest import Answer, Clusters, wait_until

# Takes the tiny model eight seconds: on a busy machine the checks before the end took more than three.
NUM_TOKENS = 4000
FINISH_S = 90.0

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def long_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "long-llama"
    shutil.copytree(tiny_model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return directory


@pytest.fixture
def serve(clusters: Clusters, long_model_dir: Path, tmp_path: Path) -> Iterator[Serve]:
    clusters.close()
    at_end = ExitStack()

    def started(*arguments: str) -> Server:
        server = start("--model", str(long_model_dir), "--num-pages", "640", *arguments, runtime_dir=tmp_path)
        at_end.callback(lambda: end_processes([p for p in server.tree if p.is_alive()], 5.0))
        return server

    with at_end:
        yield started


class LongRequest:
    def __init__(self, server: Server) -> None:
        self.answer = Answer()
        self.error: TandemError | None = None
        self.ended_at = 0.0
        self._client = TandemClient(server.address)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: self.answer.token_ids or self.ended_at, 20.0, "the first token")

    def finish(self) -> None:
        self._thread.join(FINISH_S)
        assert not self._thread.is_alive(), "the request hangs"

    def _read(self) -> None:
        try:
            with self._client:
                for response in self._client.generate(long_request(), timeout_s=FINISH_S):
                    self.answer.add(response)
        except TandemError as error:
            self.error = error
        self.ended_at = time.monotonic()


def long_request() -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    )


def health(server: Server) -> int:
    with grpc.insecure_channel(server.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
    return int(answer.status)


def wait_gone(server: Server) -> None:
    wait_until(lambda: not any(p.is_alive() for p in server.tree), GONE_S, "nothing is left")


def test_running_requests_finish_and_new_ones_are_refused(serve: Serve) -> None:
    server = serve("--drain-timeout", "90")
    requests = [LongRequest(server) for _ in range(2)]
    wait_until(lambda: health(server) == health_pb2.HealthCheckResponse.SERVING, 1.0, "health says so")
    with TandemClient(server.address) as client:
        client.server_info()
        os.kill(server.process.pid, signal.SIGTERM)
        wait_until(lambda: health(server) == health_pb2.HealthCheckResponse.NOT_SERVING, 5.0, "health says so")
        with pytest.raises(TandemError, match="the server is shutting down") as refused:
            list(client.generate(long_request(), timeout_s=5.0))
        info = client.server_info()
    assert refused.value.code == "UNAVAILABLE"
    assert (info.ready, info.not_ready_reason) == (False, "the server is shutting down")
    assert not any(request.ended_at for request in requests), "the test needs longer requests"
    for request in requests:
        request.finish()
        assert request.error is None
        assert len(request.answer.token_ids) == NUM_TOKENS
        assert request.answer.last.finish_reason == pb.FINISH_REASON_LENGTH
    assert server.finish() == 0
    waited_s = server.said_at("Requests left: 2") - server.said_at("Stopping")
    left = re.search(r"Requests left: 2; waiting (\d+) s at most", "".join(server.output))
    # Mostly 90: the routers' answers take time.
    assert left is not None and abs(int(left[1]) - (90 - waited_s)) < 1


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_drain_at_once(serve: Serve) -> None:
    server = serve("--both", "1", "--drain-timeout", "60")
    request = LongRequest(server)
    os.kill(server.process.pid, signal.SIGINT)
    wait_until(lambda: "Requests left: 1" in "".join(server.output), 5.0, "it drains")
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(server.process.pid, signal.SIGINT)
    wait_gone(server)
    print("gone after", time.monotonic() - began)
    request.finish()
    assert request.error is not None
    assert server.process.wait(1.0) == 128 + signal.SIGKILL


@pytest.mark.slow
def test_killed_guard_skips_the_drain(serve: Serve) -> None:
    server = serve("--both", "1", "--drain-timeout", "60")
    request = LongRequest(server)
    began = time.monotonic()
    os.kill(server.process.pid, signal.SIGKILL)
    wait_gone(server)
    print("gone after", time.monotonic() - began)
    request.finish()
    assert request.error is not None
