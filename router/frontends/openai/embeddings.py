"""POST /v1/embeddings."""

import asyncio
import base64
import contextlib
import time
from collections.abc import Sequence
from contextlib import aclosing

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.router.frontends.base import Frontend
from tandem.router.frontends.embedding import (
    begin_embeddings,
    embedded,
    embedding_params,
    floats,
    input_cut,
    num_at_once,
    tokenize_inputs,
)
from tandem.router.frontends.generation import Generation
from tandem.router.frontends.openai.cached_tokens import cached_details
from tandem.router.frontends.openai.embeddings_schema import EmbeddingList, EmbeddingRequest
from tandem.router.frontends.openai.request import count_unknown_fields
from tandem.router.frontends.openai.streaming import READ_TIMEOUT_S, to_json, unless_client_leaves


class PiecesResponse(Response):
    """JSON in pieces, which are never joined: an answer may have a hundred megabytes.

    A client that takes none of them for READ_TIMEOUT_S loses the rest.
    """

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = len(self._pieces) - 1
        # An answer that is not complete closes its connection.
        with contextlib.suppress(TimeoutError):
            for number, piece in enumerate(self._pieces):
                async with asyncio.timeout(READ_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": number < last})


def add_embeddings(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embeds texts or token ids: the last token's hidden state of the served model."""
        return await serve_embeddings(frontend, body, request)


async def serve_embeddings(frontend: Frontend, body: EmbeddingRequest, request: Request) -> Response:
    key, request_id = request.state.key, request.state.request_id
    count_unknown_fields(frontend, body)
    with frontend.refusals_counted(request_id):
        model = frontend.served_model(body.model or "")
        inputs = body.inputs
        at_once = num_at_once(frontend, len(inputs))
        params = embedding_params(frontend, body.dimensions, is_normalized=body.is_normalized)
        with frontend.admission(key, at_once):
            namespace = frontend.cache_namespace(key, body.cache_namespace or body.cache_salt or "", model)
            cut = input_cut(frontend, body.truncate_prompt_tokens, keeps_end=body.truncation_side == "left")
            prompts = await tokenize_inputs(
                frontend, inputs, namespace, cut, add_special_tokens=body.add_special_tokens is not False
            )
        generations = await begin_embeddings(
            frontend,
            prompts,
            params,
            key=key,
            request_id=request_id,
            model=model,
            priority=body.priority or 0,
            session_id=body.session_id or "",
        )

    async def collect() -> None:
        async with aclosing(embedded(frontend, key, generations, at_once)) as ended:
            async for _, generation in ended:
                with frontend.refusals_counted(request_id):
                    request.state.hold(len(generation.tracker.embedding))

    await unless_client_leaves(request.receive, collect())
    answer = {
        "id": f"embd-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "usage": _usage(generations),
    }
    pieces = [f'{to_json(answer)[:-1]},"data":['.encode()]
    for index, generation in enumerate(generations):
        # Numbers as text take a millisecond for each thousand.
        await asyncio.sleep(0)
        item = to_json({"object": "embedding", "index": index, "embedding": _value(generation, body)})
        pieces.append(f"{',' if index else ''}{item}".encode())
        with frontend.refusals_counted(request_id):
            request.state.hold(len(pieces[-1]))
    return PiecesResponse([*pieces, b"]}"])


def _value(generation: Generation, body: EmbeddingRequest) -> list[float] | str:
    values = generation.tracker.embedding
    if body.encoding_format == "base64":
        return base64.b64encode(values).decode()
    return floats(values)


def _usage(generations: Sequence[Generation]) -> dict[str, object]:
    num_tokens = sum(len(generation.tracker.prompt_ids) for generation in generations)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": cached_details(generation.tracker for generation in generations),
    }
