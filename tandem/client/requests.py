"""Requests from plain Python values, and the clients' errors and TLS."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tandem.client.connect_errors import explain
from tandem.v1 import inference_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:50051"

# Text of one user message, role-content mappings, or protobuf messages.
Messages = str | Sequence[Mapping[str, str] | pb.ChatMessage]


class TandemError(Exception):
    """A failed call. Attributes: code: name of the gRPC status code, such as "UNAVAILABLE"."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code = code


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS to the router.

    Attributes:
        ca_file: PEM file of the trusted authorities; empty: the system's.
        cert_file, key_file: the client's own, if the router requires a certificate.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError if a file cannot be read."""
        ca, cert, key = (Path(f).read_bytes() if f else None for f in (self.ca_file, self.cert_file, self.key_file))
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


STRUCTURED_OUTPUTS = ("json_schema", "regex", "choices", "grammar")


def make_request(
    prompt: str | Sequence[int] | None = None,
    *,
    messages: Messages | None = None,
    model: str = "",
    request_id: str = "",
    priority: int = 0,
    cache_namespace: str = "",
    session_id: str = "",
    structured_output: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
    """Build a request from a text, token ids or a chat; omitted fields get the server's defaults.

    Args:
        structured_output: one of {"json_schema": dict or str}, {"regex": str}, {"choices": list of str}, {"grammar":
            str}.
        sampling: fields of SamplingParams, such as max_tokens, temperature, seed, stop.

    Raises:
        ValueError: not exactly one of `prompt` and `messages`, not exactly one constraint, or an unknown sampling
            field.
    """
    if (prompt is None) == (messages is None):
        raise ValueError("exactly one of prompt and messages is needed")
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        priority=priority,
        cache_namespace=cache_namespace,
        session_id=session_id,
        sampling=pb.SamplingParams(**sampling),
    )
    if structured_output is not None:
        kinds = list(structured_output)
        if len(kinds) != 1 or kinds[0] not in STRUCTURED_OUTPUTS:
            raise ValueError(f"structured_output is one of {', '.join(STRUCTURED_OUTPUTS)}, not {kinds}")
        [(kind, value)] = structured_output.items()
        if kind == "choices":
            request.structured_output.choices.texts.extend(value)
        else:
            setattr(request.structured_output, kind, value if isinstance(value, str) else json.dumps(value))
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    elif isinstance(messages, str):
        request.chat.messages.add(role="user", content=messages)
    else:
        for message in messages or ():
            proto = message if isinstance(message, pb.ChatMessage) else pb.ChatMessage(**message)
            request.chat.messages.append(proto)
        request.chat.SetInParent()
    return request


# One text or the token ids of one, or several of either.
EmbedInputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


def make_embed_request(
    inputs: EmbedInputs,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    truncate_prompt_tokens: int | None = None,
    keep_last_tokens: bool = False,
    model: str = "",
    request_id: str = "",
    priority: int = 0,
    cache_namespace: str = "",
) -> pb.EmbedRequest:
    """Build a request for embeddings.

    Args:
        normalize: scale each embedding to length 1.
        dimensions: leading dimensions to keep; None for all.
        truncate_prompt_tokens: tokens of each input to keep; -1 for as many as the model takes; None to have longer
            inputs refused.
        keep_last_tokens: keep the last tokens of a longer input instead of the first.
    """
    request = pb.EmbedRequest(
        request_id=request_id,
        model=model,
        normalize=normalize,
        dimensions=dimensions,
        truncate_prompt_tokens=truncate_prompt_tokens,
        keep_last_tokens=keep_last_tokens,
        priority=priority,
        cache_namespace=cache_namespace,
    )
    one = isinstance(inputs, str) or (len(inputs) > 0 and isinstance(inputs[0], int))
    several: Sequence[Any] = [inputs] if one else inputs
    for text_or_ids in several:
        added = request.inputs.add()
        if isinstance(text_or_ids, str):
            added.text = text_or_ids
        else:
            added.token_ids.ids.extend(text_or_ids)
            added.token_ids.SetInParent()
    return request


def metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def translate(error: Any, address: str) -> TandemError:
    """Convert a gRPC error, with advice on unreachable servers and timeouts."""
    code, details = error.code(), error.details() or ""
    # gRPC's own messages for a closed port or an unknown name. A router without workers uses other words.
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(("failed to connect", "errors resolving")):
        details = explain(details, address)
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and details == "Deadline Exceeded":
        details = f"{address} has not answered in time"
    return TandemError(code.name, details)
