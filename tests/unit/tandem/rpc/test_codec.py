"""Messages survive encoding."""

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import messages as m
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.codec import RECEIVER_CODEC, ROUTER_CODEC, SENDER_CODEC, WORKER_CODEC, BatchCodec
from tandem.sampling_params import SamplingParams
from tandem.v1 import worker_pb2
from tests.fakes.sampling_params import any_sampling_params

ROOT = Path(__file__).parents[4]

# Types of message fields; int is the narrowest integer of any field.
SCALARS = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    int: st.integers(0, 2**31 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a message field's type."""
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=4).map(tuple)
    if hint is SamplingParams:
        return any_sampling_params()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{f.name: values(hints[f.name]) for f in dataclasses.fields(hint)})
    if type(None) in get_args(hint):
        return st.none() | values(get_args(hint)[0])
    return SCALARS[hint]


@pytest.mark.parametrize(
    ("union", "codec"),
    [
        (m.WorkerMessage, WORKER_CODEC),
        (m.RouterMessage, ROUTER_CODEC),
        (m.SenderMessage, SENDER_CODEC),
        (m.ReceiverMessage, RECEIVER_CODEC),
    ],
    ids=["worker", "router", "sender", "receiver"],
)
def test_messages_round_trip(union: object, codec: BatchCodec) -> None:
    kinds = st.one_of([values(cls) for cls in get_args(union)])

    @given(st.lists(kinds, max_size=5))
    def check(batch: list[object]) -> None:
        wire = codec.encode(batch).SerializeToString()
        parsed = codec.encode([]).__class__.FromString(wire)
        assert codec.decode(parsed) == batch

    check()


def test_a_message_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="another protocol version"):
        WORKER_CODEC.decode(worker_pb2.WorkerBatch(messages=[worker_pb2.WorkerMessage()]))


@pytest.mark.parametrize(
    "lists",
    [
        {"token_ids": [1]},
        {"token_ids": [1, 2, 3]},
        {"attempts": [0, 0]},
        {"request_ids": []},
        {"num_logprobs": [1]},
        {"num_logprobs": [0, 0]},
    ],
)
def test_mismatched_token_lists_are_refused(lists: dict[str, Any]) -> None:
    whole: dict[str, Any] = {
        "request_ids": ["a"],
        "attempts": [0],
        "indices": [7],
        "num_tokens": [2],
        "token_ids": [1, 2],
    }

    def decode(tokens: worker_pb2.Tokens) -> list[object]:
        return WORKER_CODEC.decode(worker_pb2.WorkerBatch(messages=[worker_pb2.WorkerMessage(tokens=tokens)]))

    assert decode(worker_pb2.Tokens(**whole)) == [m.Tokens((m.TokenEvent("a", 0, 7, (1, 2)),))]
    with pytest.raises(ValueError):
        decode(worker_pb2.Tokens(**{**whole, **lists}))


def test_writer_joins_pending_messages_and_ends_after_close() -> None:
    async def scenario() -> list[list[object]]:
        writer = BatchWriter(ROUTER_CODEC)
        batches = writer.batches()
        writer.send([m.Abort("a", 0)])
        writer.send([m.Abort("b", 0), m.Abort("c", 1)])
        seen = [ROUTER_CODEC.decode(await anext(batches))]
        writer.send([m.Abort("d", 0)])
        writer.close()
        writer.send([m.Abort("after close", 0)])
        seen += [ROUTER_CODEC.decode(batch) async for batch in batches]
        return seen

    assert asyncio.run(scenario()) == [[m.Abort("a", 0), m.Abort("b", 0), m.Abort("c", 1)], [m.Abort("d", 0)]]


def test_generated_code_is_current(tmp_path: Path) -> None:
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "proto/tandem/v1").glob("*.proto"))
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=proto", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    generated = sorted((tmp_path / "tandem/v1").iterdir())
    assert len(generated) == 3 * len(sources)
    for path in generated:
        assert path.read_text() == (ROOT / "tandem/v1" / path.name).read_text(), f"run `make proto`: {path.name}"
