"""Large gRPC requests that cannot be served are refused before they are parsed."""

import pytest

from tandem.embedding import MAX_INPUTS
from tandem.router.frontends.encoded_request import (
    MAX_FIELDS,
    MAX_INPUT_FIELDS,
    MAX_MESSAGE_FIELDS,
    MAX_SAMPLING_BYTES,
    MAX_UNCHECKED_BYTES,
    UnreasonableError,
    check_encoded,
    check_encoded_inputs,
)
from tandem.router.text.prompt_encoder import MAX_MESSAGES
from tandem.router.text.stop_strings import MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS
from tandem.router.text.structured_output import MAX_BYTES as MAX_STRUCTURE_BYTES
from tandem.sampling_params import MAX_NUM_BIASED, MAX_NUM_STOP_TOKENS
from tandem.v1 import inference_pb2 as pb

MAX_MODEL_LEN = 100_000
MANY = 2 * MAX_UNCHECKED_BYTES
TEXT, TOKEN_IDS, CHAT, SAMPLING, STRUCTURE = (
    pb.GenerateRequest.DESCRIPTOR.fields_by_name[name].number
    for name in ("text", "token_ids", "chat", "sampling", "structured_output")
)


def varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


FULL_SAMPLING = pb.SamplingParams(
    max_tokens=5,
    logit_bias={2**32 - 1 - i: -1.0 for i in range(MAX_NUM_BIASED)},
    stop_token_ids=[2**32 - 1] * MAX_NUM_STOP_TOKENS,
    stop=["\N{GRINNING FACE}" * MAX_STOP_STRING_LENGTH] * MAX_STOP_STRINGS,
)


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text="x" * 10**6, sampling=FULL_SAMPLING, request_id="x" * 256),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1] * MAX_MODEL_LEN)),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 99)] * MAX_MESSAGES)),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="é" * 10**6)] * 3)),
        pb.GenerateRequest(text="x" * MANY, structured_output=pb.StructuredOutput(regex="x" * MAX_STRUCTURE_BYTES)),
    ],
    ids=["text", "token_ids", "messages", "long messages", "long grammar"],
)
def test_what_could_be_served_is_parsed(request_: pb.GenerateRequest) -> None:
    data = request_.SerializeToString()
    assert len(data) > MAX_UNCHECKED_BYTES
    check_encoded(data, MAX_MODEL_LEN)


def test_token_ids_need_not_be_packed() -> None:
    one = varint(1 << 3) + varint(2**32 - 1)
    data = field(TOKEN_IDS, one * MAX_MODEL_LEN)
    assert len(pb.GenerateRequest.FromString(data).token_ids.ids) == MAX_MODEL_LEN
    check_encoded(data, MAX_MODEL_LEN)


def test_a_small_request_is_the_parser_s() -> None:
    check_encoded(field(CHAT, field(1, b"") * (MAX_UNCHECKED_BYTES // 2 - 10)), MAX_MODEL_LEN)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (field(SAMPLING, field(10, b"") * MANY), "sampling has more than .* logit_bias may name 300 tokens"),
        (field(SAMPLING, field(12, b"\1" * MANY)), "sampling has more than .* stop_token_ids 300"),
        (field(SAMPLING, b"x" * (MAX_SAMPLING_BYTES // 2 + 1)) * 2, "sampling has more than"),
        (field(TOKEN_IDS, field(1, b"\1" * 7 * MAX_MODEL_LEN)), "token ids cannot fit; .* is 100000 tokens"),
        (field(TOKEN_IDS, b"\1" * 4 * MAX_MODEL_LEN) * 2, "bytes of token ids cannot fit"),
        (field(STRUCTURE, field(3, field(1, b"a") * MANY)), "structured_output has .* at most 65536 bytes are taken"),
        (field(STRUCTURE, field(1, b"x" * MAX_STRUCTURE_BYTES)) * 2, "structured_output has"),
        (field(CHAT, field(1, b"") * MANY), f"the chat has more than {MAX_MESSAGES} messages"),
        (field(CHAT, field(1, b"") * MAX_MESSAGES) + field(CHAT, field(1, b"x" * MANY)), "the chat has more than"),
        (field(CHAT, field(1, field(1, b"") * MANY)), f"messages has more than {MAX_MESSAGE_FIELDS} fields"),
        (field(TEXT, b"") * MANY, f"the request has more than {MAX_FIELDS} fields"),
        (varint(15 << 3) + b"\1" + b"\x7b" * MANY, "a field has wire type 3"),
        # The check stops at the limit.
        (field(CHAT, field(1, b"") * MANY) + b"\xff", "the chat has more than"),
    ],
    ids=[
        "map", "packed", "sampling in parts", "token ids", "token ids in parts", "choices", "grammar in parts",
        "messages", "messages in parts", "fields of a message", "fields", "groups", "malformed",
    ],
)  # fmt: skip
def test_what_could_not_be_served_is_not_parsed(data: bytes, message: str) -> None:
    with pytest.raises(UnreasonableError, match=message):
        check_encoded(data, MAX_MODEL_LEN)


@pytest.mark.parametrize("end", [b"\x1a\xff\xff\xff\xff\x7f", b"\x0d\1", b""])
def test_what_cannot_be_parsed_is_the_parser_s_to_refuse(end: bytes) -> None:
    check_encoded(field(TEXT, b"x" * MANY) + end, MAX_MODEL_LEN)
    check_encoded((field(TEXT, b"x" * MANY) + end)[:MANY], MAX_MODEL_LEN)


INPUTS = pb.EmbedRequest.DESCRIPTOR.fields_by_name["inputs"].number
MAX_TOKENS = 200_000


@pytest.mark.parametrize(
    "request_",
    [
        pb.EmbedRequest(inputs=[pb.EmbedInput(text="x" * 10**6)], model="x" * 256, request_id="x" * 256, priority=1),
        pb.EmbedRequest(inputs=[pb.EmbedInput(text="x" * 99)] * MAX_INPUTS),
        pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[2**32 - 1] * 97))] * MAX_INPUTS),
        pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[2**32 - 1] * MAX_TOKENS))]),
    ],
    ids=["text", "texts", "lists", "list"],
)
def test_inputs_that_could_be_embedded_are_parsed(request_: pb.EmbedRequest) -> None:
    data = request_.SerializeToString()
    assert len(data) > MAX_UNCHECKED_BYTES
    check_encoded_inputs(data, MAX_TOKENS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (field(INPUTS, b"") * MANY, f"more than {MAX_INPUTS} inputs"),
        (field(INPUTS, field(1, b"") * MANY), f"more than {MAX_INPUT_FIELDS} fields"),
        (field(INPUTS, field(2, field(1, b"\1" * 7 * MAX_TOKENS))), "bytes of token ids, more than the 200000 tokens"),
        (field(INPUTS, field(2, b"\1" * 1000)) * MAX_INPUTS, "bytes of token ids"),
        (field(1, b"") * MANY, f"more than {MAX_INPUTS} inputs"),
    ],
    ids=["inputs", "fields of an input", "token ids", "token ids in parts", "fields"],
)
def test_inputs_that_could_not_be_embedded_are_not_parsed(data: bytes, message: str) -> None:
    with pytest.raises(UnreasonableError, match=message):
        check_encoded_inputs(data, MAX_TOKENS)
