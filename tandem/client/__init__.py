"""Clients of a cluster's gRPC frontend: TandemClient for threads, AsyncTandemClient for asyncio.

    with TandemClient("127.0.0.1:50051") as client:
        for response in client.chat("What is the capital of France?", max_tokens=32):
            print(response.text, end="", flush=True)

Messages are those of `tandem/v1/inference.proto`; `make_request` builds a request from Python values. A client spreads
its calls over all routers of the cluster. If a router dies, its streams resume at another with the next token.
"""

from tandem.client.clients import AsyncTandemClient, TandemClient
from tandem.client.requests import DEFAULT_ADDRESS, ClientTls, Messages, TandemError, make_request

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncTandemClient",
    "ClientTls",
    "Messages",
    "TandemClient",
    "TandemError",
    "make_request",
]
