"""Tokens in headers and in gRPC metadata, checked before any part of a request is read."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

CLUSTER_TOKEN_HEADER = "tandem-cluster-token"
HEALTH_PREFIX = "/grpc.health.v1.Health/"


class TokenSet:
    """Secrets, compared in constant time."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, token: str) -> bool:
        digest = _digest(token)
        # Compare with all, so that the time does not depend on which one matches.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def bearer_token(authorization: str | None) -> str:
    """Return the token of an Authorization header "Bearer TOKEN", or ""."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def cluster_metadata(token: str) -> tuple[tuple[str, str], ...]:
    return ((CLUSTER_TOKEN_HEADER, token),) if token else ()


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls by their method and metadata with UNAUTHENTICATED, except health checks."""

    def __init__(self, refusal: Callable[[str, dict[str, str]], str]) -> None:
        """Args: refusal: maps a call's method, "/package.Service/Method", and its metadata to the reason for its
        refusal, or ""."""
        self._refusal = refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        metadata = {k: v for k, v in handler_call_details.invocation_metadata if isinstance(v, str)}
        reason = self._refusal(handler_call_details.method, metadata)
        return _refusing(handler, reason) if reason else handler


def cluster_auth(token: str) -> AuthInterceptor:
    tokens = TokenSet([token])

    def refusal(method: str, metadata: dict[str, str]) -> str:
        if metadata.get(CLUSTER_TOKEN_HEADER, "") in tokens:
            return ""
        return "this port is for processes of the cluster alone: the cluster token is missing or wrong"

    return AuthInterceptor(refusal)


def _refusing(handler: grpc.RpcMethodHandler, reason: str) -> grpc.RpcMethodHandler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    # gRPC reads a single request before it calls the handler, but leaves a request stream to the handler.
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.stream_unary_rpc_method_handler(refuse)
