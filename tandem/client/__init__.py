"""Clients of a cluster's gRPC frontend: TandemClient for threads, AsyncTandemClient for asyncio.

    with TandemClient("127.0.0.1:50051") as client:
        for response in client.chat("What is the capital of France?", max_tokens=32):
            print(response.text, end="", flush=True)
        [first, second] = client.embed(["one text", "another"])
        similarity = sum(a * b for a, b in zip(first.values, second.values))

Messages are those of `tandem/v1/inference.proto`; `make_request` builds a request from Python values. A client spreads
its calls over all routers of the cluster. If a router dies, its streams resume at another with the next token.
"""

from tandem.client.clients import AsyncTandemClient, TandemClient
from tandem.client.requests import (
    DEFAULT_ADDRESS,
    ClientTls,
    EmbedInputs,
    Messages,
    TandemError,
    make_embed_request,
    make_request,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncTandemClient",
    "ClientTls",
    "EmbedInputs",
    "Messages",
    "TandemClient",
    "TandemError",
    "make_embed_request",
    "make_request",
]
