"""Typed messages as JSON. Decoding builds the expected classes only; unpickling would run code of the sender."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Raises ValueError: a string is not Unicode, such as a path of other bytes."""
    from pydantic_core import PydanticSerializationError

    try:
        # `decode` refuses a wrong type. A warning here would print the value, which may be a key.
        message: str = _message_type(type(value))(body=value).model_dump_json(warnings=False)
    except PydanticSerializationError as error:
        raise ValueError(f"an option or environment variable cannot be sent to other processes: {error}") from None
    return message.encode()


def decode(kind: type[T], message: bytes) -> T:
    """Raises ValueError: the message is not JSON, has unknown or missing fields, or a value does not fit its field."""
    from pydantic import ValidationError

    refusal = f"the message is not a {kind.__name__} of this version of tandem"
    try:
        decoded = _message_type(kind).model_validate_json(message)
    except ValidationError as error:
        wrong = [": ".join([*map(str, e["loc"][1:]), e["msg"]]) for e in error.errors(include_input=False)]
        raise ValueError(f"{refusal}: {'; '.join(wrong)}") from None
    # A missing field with a default passes validation, but is present after re-encoding.
    if json.loads(decoded.model_dump_json()) != json.loads(message):
        raise ValueError(f"{refusal}: it lacks fields")
    body: T = decoded.body
    return body


def _make_message_type(kind: Any) -> Any:
    # Slow to import, and rarely needed.
    from pydantic import ConfigDict, create_model

    # Plain dataclasses inherit the configuration of the model that holds them.
    config = ConfigDict(
        extra="forbid",
        strict=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    )
    return create_model(kind.__name__, __config__=config, body=(kind, ...))


_message_type: Callable[[Any], Any] = cache(_make_message_type)
