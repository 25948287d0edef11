"""Talks with a cluster over gRPC, from a thread and from asyncio.

    make serve                     # in another terminal
    .venv/bin/python examples/grpc_client.py

TANDEM_ADDRESS (default 127.0.0.1:50051) and TANDEM_API_KEY select the cluster.

Clients in other languages generate their stubs from tandem/v1/inference.proto.
"""

import asyncio
import os

from tandem.client import DEFAULT_ADDRESS, AsyncTandemClient, TandemClient

ADDRESS = os.environ.get("TANDEM_ADDRESS", DEFAULT_ADDRESS)
API_KEY = os.environ.get("TANDEM_API_KEY", "")


def ask_once() -> None:
    with TandemClient(ADDRESS, api_key=API_KEY) as client:
        for response in client.chat("What is the capital of France?", max_tokens=32):
            print(response.text, end="", flush=True)
        print(f"\n{response.usage.completion_tokens} tokens, phases:")
        for phase in response.phases:
            print(f"  {phase.name:<16} {phase.start_ms:7.1f} ms + {phase.duration_ms:.1f}")


async def ask_many() -> None:
    async with AsyncTandemClient(ADDRESS, api_key=API_KEY) as client:

        async def complete(prompt: str) -> str:
            text = ""
            async for response in client.complete(prompt, max_tokens=12, temperature=0.7, seed=1):
                text += response.text
            return text

        prompts = ["The sea is", "A lighthouse is", "In winter"]
        for prompt, text in zip(prompts, await asyncio.gather(*map(complete, prompts)), strict=True):
            print(f"{prompt}{text}\n")


if __name__ == "__main__":
    ask_once()
    asyncio.run(ask_many())
