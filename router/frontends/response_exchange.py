"""Lookup of kept responses at other routers, over gRPC on the cluster's own ports.

A response stays at the router that made it, and its id ends with a digest of that router's name.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import grpc

from tandem.router.errors import InvalidRequestError, OverloadedError, UnavailableError
from tandem.router.frontends.kept_responses import KeptResponse, KeptResponses
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import router_pb2 as pb
from tandem.v1 import router_pb2_grpc

ID_PREFIX = "resp_"
ID_BYTES = 16
# Digest of a router's name in an id; no secret.
HOME_BYTES = 4
FIND_TIMEOUT_S = 2.0
# Concurrent lookups: each conversation may have MAX_CONVERSATION_BYTES.
MAX_ASKED = 32
WAIT_TIMEOUT_S = 10.0
# As large as a body that holds the whole conversation may be by default.
MAX_CONVERSATION_BYTES = 8 * 2**20


class ResponseExchange(router_pb2_grpc.RouterResponsesServicer):
    """Both ends of one router's exchange. Belongs to the router's loop."""

    def __init__(
        self,
        router_id: str,
        peers: Mapping[str, str],
        kept: KeptResponses,
        credentials: ClusterCredentials,
        max_conversation_bytes: int = MAX_CONVERSATION_BYTES,
    ) -> None:
        self.kept = kept
        self._home = _home_of(router_id)
        self._peers = {_home_of(name): address for name, address in peers.items()}
        self._credentials = credentials
        self._max_conversation_bytes = max_conversation_bytes
        self._slots = asyncio.Semaphore(MAX_ASKED)

    def new_id(self) -> str:
        return f"{ID_PREFIX}{secrets.token_hex(ID_BYTES)}{self._home}"

    async def find(self, response_id: str, key_digest: str, *, with_earlier: bool) -> KeptResponse | None:
        """Finds a response of this key at any router; `with_earlier` includes the conversation before it.

        Raises UnavailableError: its router does not answer; OverloadedError: too many lookups; InvalidRequestError: the
        conversation is too long to be continued.
        """
        address = self._elsewhere(response_id)
        if address is None:
            kept = self.kept.find(response_id, key_digest)
            if kept is not None and with_earlier:
                self._check_length(kept)
            return kept
        request = pb.FindResponseRequest(response_id=response_id, key_digest=key_digest, with_earlier=with_earlier)
        result = await self._ask(address, request)
        response: KeptResponse | None = None
        for turn in result.turns:
            response = KeptResponse(
                response_id, key_digest, 0.0, b"", turn.input_items, turn.output_items, previous=response
            )
        if response is not None:
            response.answer = result.answer
        return response

    async def forget(self, response_id: str, key_digest: str) -> bool:
        """Returns whether there was one. Raises as `find`."""
        address = self._elsewhere(response_id)
        if address is None:
            return self.kept.forget(response_id, key_digest)
        request = pb.FindResponseRequest(response_id=response_id, key_digest=key_digest, forget=True)
        return bool((await self._ask(address, request)).found)

    async def FindResponse(
        self, request: pb.FindResponseRequest, context: grpc.aio.ServicerContext
    ) -> pb.FindResponseResult:
        if request.forget:
            return pb.FindResponseResult(found=self.kept.forget(request.response_id, request.key_digest))
        response = self.kept.find(request.response_id, request.key_digest)
        if response is None:
            return pb.FindResponseResult()
        if request.with_earlier:
            try:
                self._check_length(response)
            except InvalidRequestError as error:
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        turns = response.turns() if request.with_earlier else [response]
        return pb.FindResponseResult(
            found=True,
            answer=response.answer,
            turns=[pb.ResponseTurn(input_items=t.input_items, output_items=t.output_items) for t in turns],
        )

    def _check_length(self, response: KeptResponse) -> None:
        num_bytes = response.num_conversation_bytes
        if num_bytes > self._max_conversation_bytes:
            raise _too_long(
                f"the kept conversation has {num_bytes} bytes; at most {self._max_conversation_bytes} are taken: "
                "begin a new one"
            )

    def _elsewhere(self, response_id: str) -> str | None:
        return self._peers.get(response_id[-2 * HOME_BYTES :])

    async def _ask(self, address: str, request: pb.FindResponseRequest) -> pb.FindResponseResult:
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._slots.acquire()
        except TimeoutError as error:
            raise OverloadedError("too many responses are being looked up; try again later") from error
        try:
            async with self._credentials.open_channel(address) as channel:
                stub: Any = router_pb2_grpc.RouterResponsesStub(channel)
                return await stub.FindResponse(request, metadata=self._credentials.metadata, timeout=FIND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                raise _too_long(error.details() or "") from error
            raise UnavailableError("the router that keeps this response does not answer; try again") from error
        finally:
            self._slots.release()


def _too_long(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "previous_response_id")


def _home_of(router_id: str) -> str:
    return hashlib.blake2b(router_id.encode(), digest_size=HOME_BYTES).hexdigest()
