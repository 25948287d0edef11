"""Checks of an encoded GenerateRequest or EmbedRequest before it is parsed.

Protobuf parses many small items slowly: 80 ms for a map of a few megabytes, 110 ms for as many empty messages. So large
requests are scanned field by field first.
"""

from collections.abc import Iterator

from tandem.embedding import MAX_INPUTS
from tandem.router.errors import PromptTooLongError
from tandem.router.text.prompt_encoder import MAX_MESSAGES
from tandem.router.text.structured_output import MAX_BYTES as MAX_STRUCTURE_BYTES
from tandem.sampling_params import MAX_NUM_BIASED, MAX_NUM_STOP_TOKENS
from tandem.v1 import inference_pb2 as pb

# Parsed within a millisecond.
MAX_UNCHECKED_BYTES = 2**16
# Mostly 16 stop strings of 1024 characters.
MAX_SAMPLING_BYTES = 2**17
# A field may repeat; the last one counts.
MAX_FIELDS = 64
# A chat's message has two fields.
MAX_MESSAGE_FIELDS = 8
# Five bytes, and one more where each id is a field of its own.
MAX_TOKEN_ID_BYTES = 6

# An input to embed has one field.
MAX_INPUT_FIELDS = 4

_INPUTS = pb.EmbedRequest.DESCRIPTOR.fields_by_name["inputs"].number
_INPUT_IDS = pb.EmbedInput.DESCRIPTOR.fields_by_name["token_ids"].number
_TOO_MANY_INPUTS = f"the request has more than {MAX_INPUTS} inputs"
_TOO_MANY_IN_INPUT = f"one of the inputs has more than {MAX_INPUT_FIELDS} fields"
_NUMBERS = {name: field.number for name, field in pb.GenerateRequest.DESCRIPTOR.fields_by_name.items()}
_TOO_MANY_FIELDS = f"the request has more than {MAX_FIELDS} fields"
_TOO_MANY_IN_MESSAGE = f"one of the chat's messages has more than {MAX_MESSAGE_FIELDS} fields"
_TOO_MANY_MESSAGES = f"the chat has more than {MAX_MESSAGES} messages"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class UnreasonableError(ValueError):
    """The request holds more than could be served."""


def check_encoded(data: bytes, max_model_len: int) -> None:
    """Raises UnreasonableError. Malformed requests are left to the parser."""
    if len(data) <= MAX_UNCHECKED_BYTES:
        return
    num_messages = num_sampling_bytes = num_structure_bytes = num_id_bytes = 0
    for number, start, end in _fields(data, 0, len(data), MAX_FIELDS, _TOO_MANY_FIELDS):
        if number == _NUMBERS["sampling"]:
            num_sampling_bytes += end - start
            if num_sampling_bytes > MAX_SAMPLING_BYTES:
                raise UnreasonableError(
                    f"sampling has more than {MAX_SAMPLING_BYTES} bytes: logit_bias may name {MAX_NUM_BIASED} tokens "
                    f"and stop_token_ids {MAX_NUM_STOP_TOKENS}"
                )
        elif number == _NUMBERS["structured_output"]:
            num_structure_bytes += end - start
            # Choices are longer as JSON, whose bytes are limited, so this refuses nothing that would be taken.
            if num_structure_bytes > MAX_STRUCTURE_BYTES + MAX_FIELDS:
                raise UnreasonableError(
                    f"structured_output has {num_structure_bytes} bytes: at most {MAX_STRUCTURE_BYTES} bytes are taken"
                )
        elif number in (_NUMBERS["token_ids"], _NUMBERS["resume"]):
            num_id_bytes += end - start
            if num_id_bytes > MAX_TOKEN_ID_BYTES * max_model_len + MAX_FIELDS:
                found = PromptTooLongError(f"{num_id_bytes} bytes of token ids cannot fit", max_model_len)
                raise UnreasonableError(str(found))
        elif number == _NUMBERS["chat"]:
            # A chat has only messages.
            for _, inner_start, inner_end in _fields(data, start, end, MAX_MESSAGES - num_messages, _TOO_MANY_MESSAGES):
                num_messages += 1
                for _ in _fields(data, inner_start, inner_end, MAX_MESSAGE_FIELDS, _TOO_MANY_IN_MESSAGE):
                    pass


def check_encoded_inputs(data: bytes, max_tokens: int) -> None:
    """Checks an EmbedRequest as check_encoded does. Args: max_tokens: of all inputs."""
    if len(data) <= MAX_UNCHECKED_BYTES:
        return
    num_id_bytes = 0
    for number, start, end in _fields(data, 0, len(data), MAX_INPUTS + MAX_FIELDS, _TOO_MANY_INPUTS):
        if number != _INPUTS:
            continue
        for inner, inner_start, inner_end in _fields(data, start, end, MAX_INPUT_FIELDS, _TOO_MANY_IN_INPUT):
            num_id_bytes += inner_end - inner_start if inner == _INPUT_IDS else 0
    if num_id_bytes > MAX_TOKEN_ID_BYTES * max_tokens + MAX_FIELDS * MAX_INPUTS:
        raise UnreasonableError(
            f"the inputs have {num_id_bytes} bytes of token ids, more than the {max_tokens} tokens that one request "
            "may have"
        )


def _fields(data: bytes, start: int, end: int, max_fields: int, too_many: str) -> Iterator[tuple[int, int, int]]:
    """Yields number, start and end of each length-delimited field. Raises UnreasonableError."""
    for _ in range(max_fields):
        if start >= end:
            return
        tag, start = _varint(data, start)
        kind = tag & 7
        if kind == _BYTES:
            length, start = _varint(data, start)
            yield tag >> 3, start, min(start + length, end)
            start += length
        elif kind == _VARINT:
            _, start = _varint(data, start)
        elif kind in (_FIXED64, _FIXED32):
            start += 8 if kind == _FIXED64 else 4
        else:
            # A group could hold anything.
            raise UnreasonableError(f"the request is malformed: a field has wire type {tag & 7}")
    if start < end:
        raise UnreasonableError(too_many)


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """Bytes past the data's end count as 0."""
    value = shift = 0
    for position in range(start, min(start + 10, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return value, start + 10
