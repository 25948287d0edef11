"""Routers with scripted workers, and clients of the APIs with named events."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from tandem.messages import Admit
from tests.fakes import chat_templates
from tests.fakes.http_cluster import KEYS, HttpCluster

TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "now"},
]
HERMES = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@dataclass
class DoorAnswer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        found = []
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        for event in events:
            name, data = event.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found


def cluster_of(
    template: str, text: str, special: tuple[str, ...] = chat_templates.SPECIAL, **config: Any
) -> HttpCluster:
    tokenizer = chat_templates.tokenizer(template, special)
    output = [*tokenizer.tokenize(text, False).ids, chat_templates.EOS]
    return HttpCluster(output, tokenizer=tokenizer, max_model_len=8000, **config)


async def call(
    cluster: HttpCluster,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    method: str = "POST",
    query: str = "",
    headers: dict[str, str] | None = None,
    router: int = 0,
    num_tokens: int | None = None,
    on_start: Any = None,
) -> DoorAnswer:
    """Send a request and serve it. Args: num_tokens: output tokens to serve; None: all."""
    app = cluster.routers[router].app
    content = b"" if body is None else json.dumps(body).encode()
    sent = {"authorization": f"Bearer {KEYS[0]}", "content-length": str(len(content)), **(headers or {})}
    if body is not None:
        sent["content-type"] = "application/json"
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in sent.items() if value],
        "state": {},
    }
    answer = DoorAnswer()
    messages = [{"type": "http.request", "body": content}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Future()

    async def send(message: Any) -> None:
        answer.status = message.get("status", answer.status)
        answer.headers |= {name.decode(): value.decode() for name, value in message.get("headers", ())}
        answer.body += message.get("body", b"")

    num_before = len(cluster.d.of(Admit))
    task = asyncio.ensure_future(app(scope, receive, send))
    # Another process checks the grammars, so the loop alone shows no progress.
    while not task.done() and len(cluster.d.of(Admit)) == num_before:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    if not task.done():
        if on_start is not None:
            await on_start()
        else:
            await cluster.serve(len(cluster.output) if num_tokens is None else num_tokens)
    await asyncio.wait_for(task, 5.0)
    return answer
