"""All kinds of requests, and how often each is sent."""

from benchmarks.soak.kinds.base import Kind
from benchmarks.soak.kinds.fresh import Fresh
from benchmarks.soak.kinds.over_grpc import Cancelled, Embedded, Grammar, Greedy, Logprobs, Resumed, Sampled
from benchmarks.soak.kinds.over_http import (
    Background,
    Bad,
    CancelledBackground,
    CancelledEvents,
    Messages,
    ResumedEvents,
    SlowReader,
    Streamed,
)
from benchmarks.soak.kinds.over_openai import Chat, OpenAiEmbeddings, Schema, Several, Tools

# Relative frequencies.
KINDS: dict[type[Kind], int] = {
    Greedy: 4,
    Sampled: 4,
    Cancelled: 2,
    Resumed: 3,
    Logprobs: 1,
    Grammar: 2,
    Embedded: 1,
    Streamed: 2,
    ResumedEvents: 3,
    SlowReader: 1,
    CancelledEvents: 2,
    Messages: 1,
    Background: 2,
    CancelledBackground: 1,
    Bad: 2,
    Chat: 2,
    Tools: 2,
    Schema: 2,
    Several: 1,
    OpenAiEmbeddings: 1,
    Fresh: 3,
}
# Of each kind: enough to differ, few enough to be asked for at the start.
NUM_REQUESTS = 3
