"""Bounds of every input, for the tables of docs/bad-input.md; `python -m tests.unit.docs.bounds` writes them there.

Numbers are the code's own constants. Each bound has a trial, or names the test that tries it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.deploy.supervise import control
from tandem.embedding import MAX_INPUTS
from tandem.engine import grammar_follower
from tandem.engine.models.config import MAX_LAYERS
from tandem.engine.models.experts import MAX_EXPERTS
from tandem.engine.weights import headers
from tandem.engine.weights.gguf import header as gguf_header
from tandem.grammar_limits import MAX_MASK_CPU_S
from tandem.kvtransfer.transports import listener as page_listener
from tandem.kvtransfer.transports.peer_socket import KNOCK_BYTES, TOKEN_BYTES
from tandem.router import control_server, fair_slots, resumption
from tandem.router.config import RouterConfig
from tandem.router.frontends import (
    background,
    base,
    embedding,
    encoded_request,
    generation,
    grpc_responses,
    health,
    intake,
    kept_responses,
    read_slots,
    response_exchange,
    watch_places,
)
from tandem.router.frontends.anthropic import context_schema
from tandem.router.frontends.openai import (
    body,
    closing_transport,
    http_connection,
    listener,
    middleware,
    off_loop,
    prompt_logprobs,
    request,
    schema,
    streaming,
    tools_schema,
)
from tandem.router.frontends.responses import kept_items, truncation
from tandem.router.frontends.responses import schema as responses_schema
from tandem.router.observe.live import feed
from tandem.router.text import grammar_check, prompt_encoder, stop_strings, structured_output
from tandem.rpc import channel, metrics_server, recording_service
from tandem.sampling_params import (
    MAX_GRAMMAR_BYTES,
    MAX_NUM_ALLOWED,
    MAX_NUM_BIASED,
    MAX_NUM_LOGPROB_IDS,
    MAX_NUM_STOP_TOKENS,
)
from tests.fakes.attacked_router import GENERATE
from tests.unit.docs import bound_trials as trials
from tests.unit.docs.bound_trials import CHATS, CHECK, EMBEDDINGS, MESSAGES, RESPONSES, Trial, numbered

PAGE = Path(__file__).parents[3] / "docs/bad-input.md"
BEGIN, END = "<!-- bounds: python -m tests.unit.docs.bounds -->\n", "<!-- end of bounds -->\n"
HEAD = "| input, bounded | size or number | time | CPU or memory | beyond it |\n|---|---|---|---|---|\n"
NONE = "–"


@dataclass(frozen=True)
class Bound:
    """A row. Attributes: trial: tries the bound at a router, or is the test that does: "tests/….py::test_…"."""

    input: str
    trial: Trial | str
    size: str = NONE
    time: str = NONE
    cost: str = NONE
    beyond: str = ""

    @property
    def row(self) -> str:
        return f"| {self.input} | {self.size} | {self.time} | {self.cost} | {self.beyond} |\n"


def num(number: float) -> str:
    return f"{number:,g}" if number < 1e6 else f"{int(number):,}"


def size(num_bytes: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num(num_bytes)} bytes"


def seconds(time_s: float) -> str:
    if time_s < 1:
        return f"{1000 * time_s:g} ms"
    if time_s >= 3600:
        return f"{time_s / 3600:g} h"
    return f"{time_s:g} s"


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1, **fields}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}


def tools(number: int) -> dict[str, Any]:
    own = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(number)]
    return chat(tools=own, tool_choice="none")


def words(field: str) -> Callable[[int], dict[str, Any]]:
    return lambda number: completion(**{field: "x" * number})


def token_ids(field: str, **more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda number: completion(**{field: [i % 250 for i in range(number)]}, **more)


def in_large_body(part: bytes, between: bytes = b",", fixed: int = 0) -> Callable[[int], bytes]:
    """Returns bodies above the size from which their structure is looked at. Args: fixed: further such parts."""

    def make(number: int) -> bytes:
        content = b'{"prompt":"a","max_tokens":1,"extra":[' + between.join([part] * (number - fixed)) + b"]}"
        return content.ljust(2 * off_loop.MAX_INLINE_BYTES)

    return make


def edits(number: int) -> dict[str, Any]:
    return chat(context_management={"edits": [{"type": "clear_tool_uses_20250919"}] * number})


def schema_of(num_bytes: int) -> dict[str, Any]:
    text = json.dumps({"type": "integer", "description": ""})
    return completion(structured_outputs={"json": text.replace('""', f'"{"x" * (num_bytes - len(text))}"')})


_DEFAULTS = RouterConfig("", "", 1)
_UNIT = "tests/unit/"
_HTTP = f"{_UNIT}router/frontends/openai/"
_ONE_OF_EACH = "context_management.edits: each type of edit may be there once"
_STATUS_400 = "400, `INVALID_ARGUMENT`"

HTTP_PORT = [
    Bound(
        "connections",
        trials.all_of(trials.connections, trials.refused_connections),
        size=f"`--max-connections` ({num(_DEFAULTS.max_connections)})",
        beyond=f"503 for {listener.MAX_REFUSED} at a time, with TLS none; then closed",
    ),
    Bound(
        "connection without a request, of a full port",
        trials.idle_connection_of_a_full_port,
        time=seconds(listener.MIN_IDLE_S),
        beyond="closed for a new one, the longest idle first",
    ),
    Bound(
        "TLS handshake",
        f"{_HTTP}test_listener.py::test_a_handshake_has_a_deadline",
        time=seconds(listener.HANDSHAKE_TIMEOUT_S),
        beyond="closed",
    ),
    Bound(
        "head",
        trials.all_of(trials.head, trials.time_of_a_head),
        size=size(http_connection.MAX_HEAD_BYTES),
        time=f"{seconds(http_connection.HEAD_TIMEOUT_S)} from the connection or its first byte",
        beyond="431; too late: closed",
    ),
    Bound("headers", trials.headers, size=num(http_connection.MAX_HEADERS), beyond="431"),
    Bound("URL", trials.url, size=size(http_connection.MAX_URL_BYTES), beyond="414"),
    Bound("trailers", trials.trailers, size="0", beyond="400"),
    Bound(
        "bytes outside the body: head, sizes and extensions of chunks",
        trials.framing,
        size=f"{size(http_connection.MAX_HEAD_BYTES)}, and 1 for {http_connection.BODY_BYTES_PER_FRAMING_BYTE} of "
        "the body",
        beyond="400",
    ),
    Bound(
        "pieces of a body",
        trials.pieces,
        size=f"{num(http_connection.MAX_PIECES)}, and 1 for {http_connection.MIN_BYTES_PER_PIECE} bytes",
        beyond="400",
    ),
    Bound(
        "rest of a refused body",
        trials.all_of(trials.rest_of_a_refused_body, trials.discarded_bytes),
        size=f"{size(closing_transport.MAX_DISCARDED_BYTES_PER_S)} a second for all",
        time=seconds(closing_transport.LINGER_S),
        beyond="closed",
    ),
    Bound("second request before the answer", trials.second_request, size="0", beyond="closed"),
    Bound(
        "unread answer of a closing connection",
        f"{_HTTP}test_listener.py::test_a_client_that_reads_nothing_of_its_answer_is_closed",
        time=f"{seconds(closing_transport.UNREAD_TIMEOUT_S)} without progress",
        beyond="closed",
    ),
    Bound(
        "unread stream",
        f"{_HTTP}test_streaming.py::test_a_client_that_takes_no_comment_counts_as_gone",
        time=f"{seconds(streaming.READ_TIMEOUT_S)} without progress",
        beyond="the request ends",
    ),
    Bound(
        "body, with a key",
        trials.all_of(trials.whole_body, trials.gap_in_a_body, trials.time_of_a_body),
        size=f"`--max-body-bytes` ({size(_DEFAULTS.max_body_bytes)})",
        time=f"{seconds(middleware.BODY_TIMEOUT_S)} for a part, {seconds(middleware.WHOLE_BODY_TIMEOUT_S)} in all",
        cost=f"above {size(off_loop.MAX_INLINE_BYTES)} read beside the loop",
        beyond="413; too late: 408",
    ),
    Bound(
        "large bodies that wait to be read",
        f"{_UNIT}router/test_fair_slots.py::test_a_clients_queue_is_bounded",
        size=f"{num(fair_slots.MAX_WAITING_PER_CLIENT)} of a client",
        time=seconds(off_loop.TIMEOUT_S),
        cost="one at a time; clients take turns",
        beyond="503",
    ),
]
GRPC_PORT = [
    Bound(
        "connections",
        f"{_HTTP}test_listener.py::test_the_grpc_port_counts_connections_before_their_handshake",
        size=f"`--max-connections` ({num(_DEFAULTS.max_connections)})",
        time=f"{seconds(channel.HANDSHAKE_TIMEOUT_MS / 1000)} for handshakes",
        beyond="closed",
    ),
    Bound(
        "calls",
        f"{_UNIT}tandem/rpc/test_channel.py::test_calls_beyond_the_limit_wait",
        size=f"{num(channel.MAX_STREAMS)} of a connection, {num(channel.MAX_CALLS)} in all",
        beyond="wait in the client; `RESOURCE_EXHAUSTED`",
    ),
    Bound(
        "headers of a call, and any frames, at all gRPC ports",
        f"{_UNIT}tandem/rpc/test_channel_floods.py::test_headers_without_end_take_little_memory",
        size=f"{size(channel.MAX_METADATA_BYTES)} of headers",
        cost=f"{size(channel.READ_BUFFER_BYTES)} of a connection read at a time",
        beyond="`RESOURCE_EXHAUSTED`; the rest is skipped",
    ),
    Bound(
        "message of a request, with a key",
        trials.all_of(trials.message, trials.unfinished_message(GENERATE, trials.SHORT_MESSAGE_S)),
        size=f"`--max-body-bytes` ({size(_DEFAULTS.max_body_bytes)})",
        time=f"{seconds(intake.TIMEOUT_S)}; {seconds(intake.GRACE_S)} if others wait, which they do for "
        f"{seconds(read_slots.WAIT_TIMEOUT_S)}",
        cost=f"{size(intake.MAX_READ_BYTES)} together",
        beyond="`RESOURCE_EXHAUSTED`; too late: `DEADLINE_EXCEEDED`",
    ),
    Bound(
        "message of health and reflection",
        trials.all_of(trials.health_message, trials.unfinished_message(CHECK, trials.SHORT_SMALL_MESSAGE_S)),
        size=size(intake.MAX_SMALL_BYTES),
        time=f"{seconds(intake.SMALL_TIMEOUT_S)}; {seconds(intake.SMALL_GRACE_S)} if others wait",
        cost=f"{intake.NUM_SMALL_SLOTS} at a time, {intake.MAX_SMALL_WAITING} wait",
        beyond="`RESOURCE_EXHAUSTED`; too late: `DEADLINE_EXCEEDED`",
    ),
    Bound(
        "health watches",
        trials.all_of(trials.watches, trials.places_of_watches),
        size=f"{watch_places.MAX_WATCHES_PER_CONNECTION} of a connection, {watch_places.MAX_WATCHES_PER_ADDRESS} of "
        f"an address ({watch_places.MAX_WATCHES_PER_KNOWN_ADDRESS} of one with a key), "
        f"{num(watch_places.MAX_WATCHES)} in all, {watch_places.NUM_RESERVED} of them for keys",
        time=f"{seconds(health.WRITE_TIMEOUT_S)} without reading",
        beyond="`RESOURCE_EXHAUSTED`",
    ),
    Bound(
        "fields of a message above 64 KiB",
        f"{_UNIT}router/frontends/test_encoded_request.py::test_what_could_not_be_served_is_not_parsed",
        size=f"{encoded_request.MAX_FIELDS}; {encoded_request.MAX_MESSAGE_FIELDS} of a chat's message, "
        f"{encoded_request.MAX_INPUT_FIELDS} of an input; {size(encoded_request.MAX_SAMPLING_BYTES)} of sampling",
        beyond="`INVALID_ARGUMENT`",
    ),
]
REQUESTS = [
    Bound(
        "strings of a large body",
        numbered(body.MAX_STRINGS, in_large_body(b'""', fixed=4), says="the body has more than {} strings"),
        size=num(body.MAX_STRINGS),
        beyond="400",
    ),
    Bound(
        "lists and objects of a large body",
        numbered(body.MAX_CONTAINERS, in_large_body(b"{}", fixed=2), says="the body has more than {} lists and obj"),
        size=num(body.MAX_CONTAINERS),
        beyond="400",
    ),
    Bound(
        "token ids of a prompt over HTTP",
        f"{_UNIT}router/frontends/openai/test_body.py::test_what_nothing_takes_is_not_read",
        size=f"{num(request.MAX_PROMPT_TOKENS)}, or the model's length; {num(body.MAX_OTHER_ITEMS)} further items",
        beyond="400",
    ),
    Bound(
        "prompts of a completion",
        numbered(schema.MAX_CHOICES, lambda n: completion(prompt=["a"] * n), says="at most {} outputs"),
        size=f"{schema.MAX_CHOICES} outputs",
        beyond="400",
    ),
    Bound(
        "`n`",
        numbered(schema.MAX_CHOICES, lambda n: completion(n=n), says="less than or equal to {}"),
        size=num(schema.MAX_CHOICES),
        beyond="400",
    ),
    Bound(
        "messages of a chat",
        numbered(
            prompt_encoder.MAX_MESSAGES,
            lambda n: chat(*[{"role": "user", "content": ""}] * n),
            path=CHATS,
            says="at most {}",
        ),
        size=num(prompt_encoder.MAX_MESSAGES),
        time=f"{seconds(prompt_encoder.TIMEOUT_S)} for tokenizing",
        cost="beside the loop above "
        f"{num(prompt_encoder.MAX_INLINE_CHARACTERS)} characters; {prompt_encoder.MAX_ENCODING_THREADS} threads",
        beyond=_STATUS_400,
    ),
    Bound(
        "other roles of a chat",
        numbered(
            base.MAX_OTHER_ROLES,
            lambda n: chat(*({"role": f"r{i}", "content": "a"} for i in range(n))),
            path=CHATS,
            says="at most {}",
        ),
        size=f"{base.MAX_OTHER_ROLES}, of {prompt_encoder.MAX_ROLE_LEN} characters",
        beyond=_STATUS_400,
    ),
    Bound(
        "tools",
        numbered(tools_schema.MAX_TOOLS, tools, path=CHATS, says="at most {} items"),
        size=f"{tools_schema.MAX_TOOLS}, of {num(tools_schema.MAX_TOOLS_CHARACTERS)} characters, nested "
        f"{tools_schema.MAX_DEPTH} deep",
        beyond="400",
    ),
    Bound(
        "template variables",
        numbered(
            tools_schema.MAX_VARIABLES,
            lambda n: chat(chat_template_kwargs={f"v{i}": 1 for i in range(n)}),
            path=CHATS,
            says="at most {} items",
        ),
        size=f"{tools_schema.MAX_VARIABLES}, of {num(tools_schema.MAX_VARIABLES_CHARACTERS)} characters",
        beyond="400",
    ),
    Bound(
        "stop strings",
        trials.all_of(
            numbered(stop_strings.MAX_STOP_STRINGS, lambda n: completion(stop=["x"] * n), says="at most {} strings"),
            numbered(stop_strings.MAX_STOP_STRING_LENGTH, words("stop"), says="1 to {} characters"),
        ),
        size=f"{stop_strings.MAX_STOP_STRINGS}, of {num(stop_strings.MAX_STOP_STRING_LENGTH)} characters",
        beyond=_STATUS_400,
    ),
    Bound(
        "`stop_token_ids`",
        numbered(MAX_NUM_STOP_TOKENS, token_ids("stop_token_ids"), says="at most {} items"),
        size=num(MAX_NUM_STOP_TOKENS),
        beyond=_STATUS_400,
    ),
    Bound(
        "`logit_bias`",
        numbered(
            MAX_NUM_BIASED, lambda n: completion(logit_bias={str(i): 1 for i in range(n)}), says="at most {} items"
        ),
        size=num(MAX_NUM_BIASED),
        beyond=_STATUS_400,
    ),
    Bound(
        "`allowed_token_ids`",
        numbered(MAX_NUM_ALLOWED, token_ids("allowed_token_ids"), says="at most {} items"),
        size=num(MAX_NUM_ALLOWED),
        beyond=_STATUS_400,
    ),
    Bound(
        "`logprob_token_ids`",
        numbered(
            MAX_NUM_LOGPROB_IDS,
            lambda n: completion(logprob_token_ids=[10**6, *range(n - 1)], logprobs=1),
            says="at most {} items",
            at="logprob_token_ids: token id 1000000 is outside the vocabulary of 1000",
        ),
        size=num(MAX_NUM_LOGPROB_IDS),
        beyond=_STATUS_400,
    ),
    Bound(
        "`cache_namespace`, `session_id`",
        trials.all_of(
            numbered(base.MAX_NAME_LEN, words("cache_namespace"), says="at most {} characters"),
            numbered(base.MAX_NAME_LEN, words("session_id"), says="at most {} characters"),
        ),
        size=f"{base.MAX_NAME_LEN} characters",
        beyond=_STATUS_400,
    ),
    Bound(
        "`cache_salt`",
        numbered(schema.MAX_SALT, words("cache_salt"), says="1 to {} characters"),
        size=f"{schema.MAX_SALT} characters",
        beyond="400",
    ),
    Bound(
        "log probabilities of prompts in an answer",
        f"{_HTTP}test_prompt_logprobs.py::test_one_request_may_not_ask_for_too_many",
        size=num(base.MAX_PROMPT_LOGPROBS),
        cost=f"{base.PROMPT_LOGPROB_BYTES} bytes in hand each; JSON of {prompt_logprobs.PIECE_ENTRIES}, gRPC of "
        f"{num(grpc_responses.MAX_TURN_NUMBERS)} numbers in one turn of the loop",
        beyond=_STATUS_400,
    ),
    Bound(
        "output of a slow reader",
        f"{_UNIT}router/frontends/test_generation.py::test_a_client_that_does_not_read_keeps_nothing_and_can_still_read_what_is_there",
        size=f"{generation.MAX_PIECE_TOKENS} tokens or {generation.MAX_PIECE_LOGPROBS} log probabilities in a piece",
        beyond="the next piece",
    ),
    Bound(
        "inputs to embed",
        trials.all_of(
            numbered(MAX_INPUTS, lambda n: {"input": ["a"] * n}, path=EMBEDDINGS, says="at most {} items"),
            numbered(
                embedding.MAX_INPUT_TOKENS,
                lambda n: {"input": [[1] * (n - n // 2), [1] * (n // 2)]},
                path=EMBEDDINGS,
                says="more than {} tokens of input",
            ),
        ),
        size=f"{num(MAX_INPUTS)}, of {num(embedding.MAX_INPUT_TOKENS)} tokens, or the model's length",
        cost=f"{embedding.MAX_AT_ONCE} in flight",
        beyond=_STATUS_400,
    ),
]
GRAMMARS = [
    Bound(
        "schema, regular expression, choices or grammar",
        numbered(structured_output.MAX_BYTES, schema_of, says="at most {} bytes are taken"),
        size=f"{size(structured_output.MAX_BYTES)}; {size(MAX_GRAMMAR_BYTES)} in the workers' form",
        time=f"{seconds(grammar_check.TIMEOUT_S)}; {seconds(structured_output.TIMEOUT_S)} with the wait",
        cost=f"{seconds(grammar_check.CPU_SECONDS)} of CPU, {size(grammar_check.NUM_BYTES)}, in a process of its own; "
        f"{structured_output.MAX_PER_CLIENT} of a client at a time",
        beyond=_STATUS_400,
    ),
    Bound(
        "CPU time of a schema",
        f"{_UNIT}router/text/test_grammar_check.py::test_a_check_is_bounded_in_cpu_time",
        cost=f"{seconds(grammar_check.CPU_SECONDS)}",
        beyond=_STATUS_400,
    ),
    Bound(
        "mask of a token",
        f"{_UNIT}engine/test_grammars.py::test_output_whose_masks_cost_too_much_ends_alone",
        cost=f"{seconds(MAX_MASK_CPU_S)} of CPU, twice",
        beyond="the output ends",
    ),
    Bound(
        "earlier output of a grammar, to follow",
        f"{_UNIT}engine/test_grammar_follower.py::test_whole_following_is_bounded",
        cost=f"{seconds(grammar_follower.MAX_CPU_S)} of CPU in turns of {seconds(grammar_follower.SLICE_S)}, "
        f"{grammar_follower.NUM_THREADS} threads",
        beyond="the output ends",
    ),
]
KEPT = [
    Bound(
        "resume token",
        trials.resume_token,
        size=f"{num(resumption.DIGEST_BYTES + resumption.MAX_TOKEN_BYTES)} bytes",
        cost="checked before tokenizing",
        beyond="`INVALID_ARGUMENT`",
    ),
    Bound(
        "event id",
        trials.event_id,
        size=f"{trials.EVENT_ID_CHARACTERS} characters",
        cost="checked before tokenizing",
        beyond="400, 404",
    ),
    Bound(
        "responses in the background",
        trials.background_runs,
        size=f"{num(background.MAX_RUNS)} of a router",
        beyond="429",
    ),
    Bound(
        "kept responses",
        trials.kept,
        size=f"{num(kept_responses.MAX_RESPONSES)} of a router",
        time=seconds(kept_responses.MAX_AGE_S),
        cost=size(kept_responses.MAX_BYTES),
        beyond="the oldest of the key with most is forgotten",
    ),
    Bound(
        "conversation to continue",
        f"{_UNIT}scenarios/test_loop_turns.py::test_a_conversation_without_end_is_refused",
        size=f"{num(kept_items.MAX_ITEMS)} items, `--max-body-bytes` "
        f"({size(response_exchange.MAX_CONVERSATION_BYTES)})",
        time=f"{seconds(response_exchange.FIND_TIMEOUT_S)} at another router",
        cost=f"{response_exchange.MAX_ASKED} lookups at a time",
        beyond="400",
    ),
    Bound(
        "`include`",
        numbered(
            responses_schema.MAX_INCLUDED,
            lambda n: {"input": "a", "max_output_tokens": 1, "include": ["reasoning.encrypted_content"] * n},
            path=RESPONSES,
            says="at most {} items",
        ),
        size=num(responses_schema.MAX_INCLUDED),
        beyond="400",
    ),
    Bound(
        "`truncation` of `auto`",
        f"{_UNIT}router/frontends/responses/test_truncation.py::test_few_tries_find_almost_the_longest_end",
        size=f"one of {num(truncation.MAX_CUTS)} cuts",
        cost=f"{1 + (truncation.MAX_CUTS - 1).bit_length()} tries",
        beyond="the next shorter cut",
    ),
    Bound(
        "viewers of the live page",
        f"{_UNIT}router/observe/live/test_feed.py::test_places_are_limited_and_freed",
        size=f"{feed.MAX_VIEWERS} of a router, shared by keys",
        cost="one frame a second for all",
        beyond="503",
    ),
    Bound(
        "recording for `tandem trace`",
        f"{_UNIT}tandem/rpc/test_recording_service.py::test_slices_beyond_the_byte_limit_count_as_dropped",
        time=seconds(recording_service.MAX_DURATION_S),
        cost=f"{size(recording_service.MAX_BYTES)}; one at a time",
        beyond="counted as dropped",
    ),
    Bound(
        "edits of `context_management`",
        numbered(context_schema.MAX_EDITS, edits, path=MESSAGES, says="at most {} items", at=_ONE_OF_EACH),
        size=f"{context_schema.MAX_EDITS}, of {context_schema.MAX_NAMES} names",
        beyond="400",
    ),
]
WORKERS = [
    Bound(
        "connections to a worker's metrics port",
        trials.metrics_connections,
        size=num(metrics_server.MAX_CONNECTIONS),
        beyond="the oldest without a key is closed",
    ),
    Bound(
        "request to a worker's metrics port",
        trials.all_of(trials.metrics_head, trials.metrics_time),
        size=f"{size(metrics_server.MAX_HEAD_BYTES)}, no body",
        time=f"{seconds(metrics_server.REQUEST_TIMEOUT_S)} with its answer",
        beyond="431; too late: closed",
    ),
    Bound(
        "connections to the gRPC ports between processes",
        f"{_UNIT}tandem/rpc/test_channel.py::test_strangers_at_a_cluster_port_are_few_and_leave",
        size=f"{num(channel.MAX_CLUSTER_CONNECTIONS)}, or a quarter of the descriptors",
        time=f"{seconds(channel.HANDSHAKE_TIMEOUT_MS / 1000)} for handshakes, "
        f"{seconds(channel.MAX_CLUSTER_IDLE_MS / 1000)} without a call",
        beyond="closed",
    ),
    Bound(
        "first message of a worker to a router",
        f"{_UNIT}router/test_control_server.py::test_who_says_nothing_is_not_waited_for",
        size=f"messages of {size(channel.MAX_MESSAGE_BYTES)}",
        time=seconds(control_server.HELLO_TIMEOUT_S),
        beyond="`INVALID_ARGUMENT`",
    ),
    Bound(
        "strangers at a port for pages",
        trials.strangers_at_a_page_port,
        size=f"{page_listener.MAX_STRANGERS}, and {page_listener.MAX_KNOCKED} that knocked; {KNOCK_BYTES} and "
        f"{TOKEN_BYTES} bytes",
        time=f"{seconds(page_listener.KNOCK_TIMEOUT_S)} for the knock, {seconds(page_listener.TOKEN_TIMEOUT_S)} for "
        "the token",
        beyond="closed",
    ),
    Bound(
        "knocks at a port for pages",
        trials.knocks_at_a_page_port,
        size=num(page_listener.MAX_KNOCKED),
        beyond="closed",
    ),
    Bound(
        "question to a cluster's control socket",
        trials.control_question,
        size=f"{size(control._MAX_LINE_BYTES)}, of the same user",
        time=seconds(control._ASK_TIMEOUT_S),
        beyond="closed",
    ),
]
FILES = [
    Bound(
        "header of a GGUF file",
        trials.gguf_counts,
        size=f"{num(gguf_header.MAX_FIELDS)} keys, {num(gguf_header.MAX_TENSORS)} tensors, names of "
        f"{size(gguf_header.MAX_NAME_BYTES)}, {gguf_header.MAX_DIMENSIONS} dimensions",
        beyond="exit status 2",
    ),
    Bound(
        "lists of a GGUF file",
        f"{_UNIT}engine/weights/gguf/test_header.py::test_lists_are_bounded_together",
        size=f"{num(gguf_header.MAX_ARRAY_ITEMS)} items together",
        beyond="exit status 2",
    ),
    Bound(
        "header of a safetensors file",
        trials.safetensors_header,
        size=size(headers.MAX_HEADER_BYTES),
        beyond="exit status 2",
    ),
    Bound(
        "layers in config.json",
        f"{_UNIT}engine/models/test_config.py::test_refuses_more_layers_than_any_model_has",
        size=num(MAX_LAYERS),
        beyond="exit status 2",
    ),
    Bound(
        "experts of a layer in config.json",
        f"{_UNIT}engine/models/test_experts.py::test_refuses_sizes",
        size=num(MAX_EXPERTS),
        beyond="exit status 2",
    ),
]
SECTIONS = {
    "The HTTP port": HTTP_PORT,
    "The gRPC port": GRPC_PORT,
    "Bodies and messages": REQUESTS,
    "Grammars": GRAMMARS,
    "Resumed and kept": KEPT,
    "Workers and processes": WORKERS,
    "Model files": FILES,
}


def text() -> Iterator[str]:
    for title, bounds in SECTIONS.items():
        yield f"\n### {title}\n\n"
        yield HEAD
        yield from (bound.row for bound in bounds)
    yield "\n"


def written(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    assert rest, "the page has no mark"
    return before + BEGIN + "".join(text()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
