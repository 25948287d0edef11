"""The router and the bare gRPC server that benchmarks/router.py compares."""

import asyncio
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.children import START_TIMEOUT_S, questions
from benchmarks.router_model import MAX_MODEL_LEN, MODEL_NAME, output_token, token_text
from tandem import logs
from tandem.config import LogConfig
from tandem.garbage import collect_young_seldom, freeze_objects
from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tandem.rpc.channel import bind, new_server
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc


def serve_router(pipe: Connection, model_dir: str, log_dir: str) -> None:
    """Run a router as the launcher starts it; send its addresses."""
    logs.configure("router", LogConfig(directory=log_dir))
    process = RouterProcess(RouterConfig(model_dir, MODEL_NAME, MAX_MODEL_LEN, grpc_port=0, http_port=0))
    addresses = process.start()
    freeze_objects()
    collect_young_seldom()
    pipe.send(addresses)
    for _ in questions(pipe):
        pass
    process.stop()


def serve_raw(pipe: Connection) -> None:
    """Run the bare server; send its address, then take step intervals."""
    service = RawService()
    loop_thread = LoopThread()
    loop_thread.start()
    pipe.send(loop_thread.call(service.start(), START_TIMEOUT_S))
    for step_interval_s in questions(pipe):
        service.step_interval_s = step_interval_s
        pipe.send(None)
    loop_thread.stop()


class RawService(inference_pb2_grpc.InferenceServicer):
    """Sends the router's messages, one token each, in step for all streams."""

    def __init__(self) -> None:
        self.step_interval_s = 0.0
        self._next_step = asyncio.Event()
        self._server: Any = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> str:
        server = self._server = new_server()
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        address = bind(server, "127.0.0.1", 0)
        await server.start()
        self._ticker = asyncio.create_task(self._tick())
        return address

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        num_tokens = request.sampling.max_tokens
        for index in range(num_tokens):
            if self.step_interval_s:
                await self._next_step.wait()
            token_id = output_token(index)
            yield pb.GenerateResponse(
                request_id=request.request_id, index=index, token_ids=(token_id,), text=token_text(token_id)
            )
        yield pb.GenerateResponse(
            request_id=request.request_id,
            index=num_tokens,
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(completion_tokens=num_tokens),
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.step_interval_s or 0.1)
            self._next_step.set()
            self._next_step = asyncio.Event()
