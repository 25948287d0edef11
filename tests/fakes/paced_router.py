"""A real router in its own process, with workers that send every stream a token each 10 ms.

A client records the longest gap of its stream.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.children import Child, questions
from benchmarks.router_workers import serve_workers
from tandem.router.config import RouterConfig
from tandem.router.process import RouterAddresses, RouterProcess
from tandem.rpc.channel import open_channel
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

STEP_INTERVAL_S = 0.01
BEGIN_TIMEOUT_S = 30.0
# More tokens than any stream gets before it is cut.
ENDLESS = 100_000


@dataclass(slots=True)
class Gap:
    """Attributes: longest_s: longest gap between two messages of the stream."""

    longest_s: float = 0.0


class PacedRouter:
    """Use as a context manager."""

    def __init__(self, model_dir: Path, max_model_len: int, **config: Any) -> None:
        self._arguments = (str(model_dir), max_model_len, config)
        self._held = ExitStack()
        self._loop_thread = LoopThread()
        self.addresses: RouterAddresses
        self.pid = 0

    def __enter__(self) -> "PacedRouter":
        with ExitStack() as held:
            router = held.enter_context(Child(_serve_router, *self._arguments))
            self.pid, self.addresses = router.pid, router.answer()
            workers = held.enter_context(Child(serve_workers, self.addresses.cluster))
            workers.answer()
            workers.ask(STEP_INTERVAL_S)
            self._loop_thread.start()
            held.callback(self._loop_thread.stop)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @contextmanager
    def watched_stream(self) -> Iterator[Gap]:
        """Watch another client's stream during the block; the yielded gap is filled in when the block ends."""
        assert self._loop_thread.loop is not None
        times: list[float] = []
        streaming = self._loop_thread.loop.create_task
        task = self._loop_thread.call(_start(streaming, self.addresses.grpc, times), BEGIN_TIMEOUT_S)
        try:
            _wait_for(lambda: len(times) > 20, "the watched stream did not begin")
            gap, first = Gap(), len(times) - 1
            yield gap
            num_seen = len(times)
            _wait_for(lambda: len(times) > num_seen + 2, "the watched stream did not go on")
            watched = times[first:]
            gap.longest_s = max(b - a for a, b in pairwise(watched))
        finally:
            self._loop_thread.loop.call_soon_threadsafe(task.cancel)


async def _start(create_task: Any, address: str, times: list[float]) -> Any:
    return create_task(_stream(address, times))


async def _stream(address: str, times: list[float]) -> None:
    async with open_channel(address) as channel:
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=ENDLESS))
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            times.append(time.perf_counter())


def _wait_for(condition: Any, message: str) -> None:
    deadline = time.monotonic() + BEGIN_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(message)
        time.sleep(0.002)


def _serve_router(pipe: Connection, model_dir: str, max_model_len: int, config: dict[str, Any]) -> None:
    process = RouterProcess(RouterConfig(model_dir, "fake", max_model_len, grpc_port=0, http_port=0, **config))
    pipe.send(process.start())
    for _ in questions(pipe):
        pass
    process.stop()
