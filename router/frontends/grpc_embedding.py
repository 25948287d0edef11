"""The method Embed of tandem.v1.Inference."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from tandem.embedding import EmbeddingParams
from tandem.router.errors import InvalidRequestError, RequestTimeoutError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.embedding import (
    EmbedInput,
    begin_embeddings,
    embedded,
    embedding_params,
    floats,
    input_cut,
    num_at_once,
    tokenize_inputs,
)
from tandem.router.frontends.generation import Generation
from tandem.router.frontends.grpc_responses import usage_of
from tandem.v1 import inference_pb2 as pb

# A client that takes no embedding for this long loses its call, as over HTTP.
WRITE_TIMEOUT_S = 120.0


class Embeddings:
    """The embeddings of one request, on their way to its client."""

    def __init__(
        self, frontend: Frontend, key: str, request_id: str, generations: list[Generation], at_once: int
    ) -> None:
        self._frontend = frontend
        self._key = key
        self._request_id = request_id
        self._generations = generations
        self._at_once = at_once

    @classmethod
    async def begin(cls, frontend: Frontend, request: pb.EmbedRequest, key: str, request_id: str) -> "Embeddings":
        """Raises RequestError."""
        model = frontend.served_model(request.model)
        at_once = num_at_once(frontend, len(request.inputs))
        params = _params(frontend, request)
        with frontend.admission(key, at_once):
            namespace = frontend.cache_namespace(key, request.cache_namespace, model)
            inputs = [_input(one) for one in request.inputs]
            num_kept = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
            cut = input_cut(frontend, num_kept, keeps_end=request.keep_last_tokens)
            prompts = await tokenize_inputs(frontend, inputs, namespace, cut)
        generations = await begin_embeddings(
            frontend, prompts, params, key=key, request_id=request_id, model=model, priority=request.priority
        )
        return cls(frontend, key, request.request_id, generations, at_once)

    async def send(self, write: Callable[[pb.EmbedResponse], Awaitable[None]]) -> None:
        """Raises RequestError."""
        async with aclosing(embedded(self._frontend, self._key, self._generations, self._at_once)) as ended:
            async for index, generation in ended:
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await write(self._response(index, generation))
                except TimeoutError:
                    raise RequestTimeoutError(f"the client took no embedding for {WRITE_TIMEOUT_S:g} s") from None

    def _response(self, index: int, generation: Generation) -> pb.EmbedResponse:
        tracker = generation.tracker
        return pb.EmbedResponse(
            request_id=self._request_id,
            index=index,
            values=floats(tracker.embedding),
            usage=usage_of(tracker),
        )


def _params(frontend: Frontend, request: pb.EmbedRequest) -> EmbeddingParams:
    dimensions = request.dimensions if request.HasField("dimensions") else None
    if dimensions == 0:
        raise InvalidRequestError("dimensions must be at least 1; leave it out for all", "dimensions")
    is_normalized = request.normalize if request.HasField("normalize") else True
    return embedding_params(frontend, dimensions, is_normalized=is_normalized)


def _input(one: pb.EmbedInput) -> EmbedInput:
    match one.WhichOneof("input"):
        case "text":
            return one.text
        case "token_ids":
            return one.token_ids.ids
    raise InvalidRequestError("an input is needed: text or token_ids", "input")
