"""Chooses the client for an endpoint."""

import importlib.util

from tandem.bench.clients.base import BenchClient, EndpointConfig

INSTALL = "pip install 'tandem-llm[bench]'"


def check_endpoint(config: EndpointConfig) -> None:
    """Raises ValueError if no client fits the URL, or a package is missing."""
    if config.url.startswith("grpc://"):
        address = config.url.removeprefix("grpc://").rstrip("/")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in host:
            raise ValueError(f"a gRPC endpoint is grpc://HOST:PORT, not {config.url!r}")
    elif config.url.startswith(("http://", "https://")):
        if importlib.util.find_spec("httptools") is None:
            raise ValueError(f"measuring over HTTP needs httptools: {INSTALL}")
        from tandem.bench.clients.openai import parse_url

        parse_url(config.url)
    else:
        raise ValueError(f"an endpoint is grpc://HOST:PORT or http://HOST[:PORT]/v1, not {config.url!r}")


def make_client(config: EndpointConfig) -> BenchClient:
    if config.url.startswith("grpc://"):
        from tandem.bench.clients.grpc import GrpcBenchClient

        return GrpcBenchClient(config)
    from tandem.bench.clients.openai import OpenAIBenchClient

    return OpenAIBenchClient(config)
