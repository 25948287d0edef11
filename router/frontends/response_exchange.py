"""Lookup of kept responses and conversations at other routers, over gRPC on the cluster's own ports.

Each stays at the router that made it, and its id ends with a digest of that router's name.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import grpc

from tandem.router.errors import InvalidRequestError, OverloadedError, UnavailableError
from tandem.router.frontends.background import BackgroundResponses
from tandem.router.frontends.kept_responses import KeptResponse, KeptResponses
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import router_pb2 as pb
from tandem.v1 import router_pb2_grpc

RESPONSE, CONVERSATION = "resp_", "conv_"
ID_BYTES = 16
# Digest of a router's name in an id; no secret.
HOME_BYTES = 4
FIND_TIMEOUT_S = 2.0
# Concurrent lookups: each conversation may have MAX_CONVERSATION_BYTES.
MAX_ASKED = 32
WAIT_TIMEOUT_S = 10.0
# Of a conversation: each has an item, and a lookup takes 0.4 us for each.
MAX_TURNS = 2**13
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
        self.background = BackgroundResponses()
        self._home = _home_of(router_id)
        self._peers = {_home_of(name): address for name, address in peers.items()}
        self._credentials = credentials
        self._max_conversation_bytes = max_conversation_bytes
        self._slots = asyncio.Semaphore(MAX_ASKED)

    def new_id(self, prefix: str = RESPONSE) -> str:
        return f"{prefix}{secrets.token_hex(ID_BYTES)}{self._home}"

    async def find(self, response_id: str, key_digest: str, *, with_earlier: bool) -> KeptResponse | None:
        """Finds a response of this key at any router; `with_earlier` includes the conversation before it.

        Raises UnavailableError: its router does not answer; OverloadedError: too many lookups; InvalidRequestError: the
        conversation is too long to be continued.
        """
        address = self._elsewhere(response_id)
        if address is None:
            return self._find_here(response_id, key_digest, with_earlier=with_earlier)
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
            await self.background.cancel(response_id, key_digest)
            return self.kept.forget(response_id, key_digest)
        request = pb.FindResponseRequest(response_id=response_id, key_digest=key_digest, forget=True)
        return bool((await self._ask(address, request)).found)

    async def cancel(self, response_id: str, key_digest: str) -> KeptResponse | None:
        """Cancels a response in progress, and returns it. Raises as `find`."""
        address = self._elsewhere(response_id)
        if address is None:
            await self.background.cancel(response_id, key_digest)
            return self.kept.find(response_id, key_digest)
        result = await self._ask(
            address, pb.FindResponseRequest(response_id=response_id, key_digest=key_digest, cancel=True)
        )
        return KeptResponse(response_id, key_digest, 0.0, result.answer, b"", b"", None) if result.found else None

    async def extend(self, conversation_id: str, key_digest: str, *, input_items: bytes, output_items: bytes) -> bool:
        """Appends a turn to a conversation of any router. Returns whether there is one. Raises as `find`."""
        turn = pb.ResponseTurn(input_items=input_items, output_items=output_items)
        return await self._change(conversation_id, key_digest, turn=turn)

    async def change(self, conversation_id: str, key_digest: str, answer: bytes) -> bool:
        """Replaces the object of a conversation of any router. Returns whether there is one. Raises as `find`."""
        return await self._change(conversation_id, key_digest, answer=answer)

    async def _change(self, conversation_id: str, key_digest: str, **changes: Any) -> bool:
        request = pb.ChangeConversationRequest(conversation_id=conversation_id, key_digest=key_digest, **changes)
        address = self._elsewhere(conversation_id)
        if address is None:
            return self._change_here(request)
        return bool((await self._call(address, "ChangeConversation", request)).found)

    def _change_here(self, request: pb.ChangeConversationRequest) -> bool:
        named = request.conversation_id, request.key_digest
        if request.HasField("turn"):
            turn, earlier = request.turn, self.kept.find(*named)
            if earlier is not None and earlier.previous is not None and earlier.previous.num_turns >= MAX_TURNS:
                raise _not_continued(f"the conversation has {MAX_TURNS} turns, and can have no more: begin a new one")
            return self.kept.extend(*named, input_items=turn.input_items, output_items=turn.output_items)
        return self.kept.change(*named, request.answer)

    def _find_here(self, response_id: str, key_digest: str, *, with_earlier: bool) -> KeptResponse | None:
        running = self.background.find(response_id, key_digest)
        if running is not None:
            if with_earlier:
                raise InvalidRequestError(f"{response_id} is in progress: wait for its end", "previous_response_id")
            return running
        kept = self.kept.find(response_id, key_digest)
        if kept is not None and with_earlier:
            self._check_length(kept)
        return kept

    async def ChangeConversation(
        self, request: pb.ChangeConversationRequest, context: grpc.aio.ServicerContext
    ) -> pb.ChangeConversationResult:
        found = False
        try:
            found = self._change_here(request)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        return pb.ChangeConversationResult(found=found)

    async def FindResponse(
        self, request: pb.FindResponseRequest, context: grpc.aio.ServicerContext
    ) -> pb.FindResponseResult:
        named = request.response_id, request.key_digest
        if request.forget or request.cancel:
            await self.background.cancel(*named)
        if request.forget:
            return pb.FindResponseResult(found=self.kept.forget(*named))
        response: KeptResponse | None = None
        try:
            response = self._find_here(*named, with_earlier=request.with_earlier)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        if response is None:
            return pb.FindResponseResult()
        turns = response.turns() if request.with_earlier else [response]
        return pb.FindResponseResult(
            found=True,
            answer=response.answer,
            turns=[pb.ResponseTurn(input_items=t.input_items, output_items=t.output_items) for t in turns],
        )

    def _check_length(self, response: KeptResponse) -> None:
        num_bytes = response.num_conversation_bytes
        if num_bytes > self._max_conversation_bytes:
            raise _not_continued(
                f"the kept conversation has {num_bytes} bytes; at most {self._max_conversation_bytes} are taken: "
                "begin a new one"
            )

    def _elsewhere(self, response_id: str) -> str | None:
        return self._peers.get(response_id[-2 * HOME_BYTES :])

    async def _ask(self, address: str, request: pb.FindResponseRequest) -> pb.FindResponseResult:
        return await self._call(address, "FindResponse", request)

    async def _call(self, address: str, method: str, request: Any) -> Any:
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await self._slots.acquire()
        except TimeoutError as error:
            raise OverloadedError("too many responses are being looked up; try again later") from error
        try:
            async with self._credentials.open_channel(address) as channel:
                stub: Any = router_pb2_grpc.RouterResponsesStub(channel)
                ask = getattr(stub, method)
                return await ask(request, metadata=self._credentials.metadata, timeout=FIND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                raise _not_continued(error.details() or "") from error
            raise UnavailableError("the router that keeps this response does not answer; try again") from error
        finally:
            self._slots.release()


def _not_continued(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "previous_response_id")


def _home_of(router_id: str) -> str:
    return hashlib.blake2b(router_id.encode(), digest_size=HOME_BYTES).hexdigest()
