"""Malformed safetensors files are refused in one line with file and tensor, and never give other weights."""

import copy
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.headers import MAX_HEADER_BYTES, tensor_names
from tandem.engine.weights.loader import checkpoint_weights
from tandem.engine.weights.resolve import resolve_model

# Two tensors of 16 bytes, the content of every header here unless broken.
HEADER = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
}
DATA = bytes(range(32))


def write(path: Path, header: Any, data: bytes = DATA, length: int | None = None) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content + data)
    return path


def broken(name: str, **fields: Any) -> dict[str, Any]:
    header: dict[str, Any] = copy.deepcopy(HEADER)
    header[name] |= fields
    return header


def test_a_header_gives_names_in_the_order_of_the_file(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": HEADER["b"], "a": HEADER["a"]}
    path = write(tmp_path / "model.safetensors", header)
    assert tensor_names(path) == ["a", "b"]
    assert {name: tensor.shape for name, tensor in checkpoint_weights(tmp_path)} == {"a": (2, 2), "b": (4,)}


def test_every_dtype_of_the_library_s_own_files_is_known(tmp_path: Path) -> None:
    dtypes = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"]
    arrays = {dtype: np.zeros((2, 3), dtype) for dtype in dtypes} | {
        "bool": np.zeros(5, bool),
        "none": np.zeros((0, 2)),
    }
    save_file(arrays, tmp_path / "a.safetensors")
    assert sorted(tensor_names(tmp_path / "a.safetensors")) == sorted(arrays)


@pytest.mark.parametrize(
    ("header", "message"),
    {
        "a float": (broken("b", data_offsets=[16, 32.0]), r"tensor 'b' has data_offsets \[16, 32.0\], not two whole"),
        "infinity": (
            json.dumps(broken("b", data_offsets=[16, 7])).replace("7]", "1e400]").encode(),
            r"tensor 'b' has data_offsets \[16, inf\], not two whole numbers",
        ),
        "true": (broken("a", data_offsets=[False, 16]), "tensor 'a' has data_offsets"),
        "text": (broken("a", data_offsets=["0", "16"]), "tensor 'a' has data_offsets"),
        "negative": (broken("a", data_offsets=[-16, 0]), "tensor 'a' has data_offsets"),
        "backwards": (broken("b", data_offsets=[32, 16]), "tensor 'b' has data_offsets"),
        "nested": (broken("a", data_offsets=[[0], [16]]), "tensor 'a' has data_offsets"),
        "three": (broken("a", data_offsets=[0, 8, 16]), "tensor 'a' has data_offsets"),
        "no list": (broken("a", data_offsets=None), "tensor 'a' has data_offsets None"),
        "huge": (broken("b", data_offsets=[2**63, 2**63 + 16]), "9223372036854775792 bytes before tensor 'b'"),
        "huger": (broken("b", data_offsets=[16, 2**64]), "tensor 'b' of shape .* takes 16 bytes"),
        "overlapping": (broken("b", data_offsets=[0, 16]), "tensors 'a' and 'b' overlap"),
        "partly": (broken("b", data_offsets=[8, 24]), "tensors 'a' and 'b' overlap"),
        "a hole": (broken("b", data_offsets=[20, 36]), "4 bytes before tensor 'b' belong to no tensor"),
        "beyond": (broken("b", shape=[6], data_offsets=[16, 40]), "tensor 'b' ends 8 bytes beyond the end of the file"),
        "short": (broken("b", shape=[2], data_offsets=[16, 24]), "8 bytes at its end belong to no tensor"),
        "a dtype": (broken("a", dtype="F31"), "tensor 'a' has dtype 'F31', which is not known"),
        "dtype 3": (broken("a", dtype=3), "tensor 'a' has dtype 3, which is not known"),
        "a dtype list": (broken("a", dtype=["F32"]), "tensor 'a' has dtype"),
        "shape -4": (broken("b", shape=[-4]), r"tensor 'b' has shape \[-4\], not whole numbers"),
        "shape 4.0": (broken("b", shape=[4.0]), r"tensor 'b' has shape \[4.0\], not whole numbers"),
        "shape text": (broken("b", shape="4"), "tensor 'b' has shape '4', not whole numbers"),
        "shape 5": (broken("b", shape=[5]), r"tensor 'b' of shape \[5\] and dtype F32 takes 20 bytes"),
        "huge shape": (broken("b", shape=[2**40, 2**40]), "tensor 'b' has shape .*, which no file has room for"),
        "overflow": (broken("b", shape=[2**62, 8]), "tensor 'b' has shape .*, which no file has room for"),
        "many sizes": (broken("b", shape=[2] * 1_000_000), "tensor 'b' has shape .*, which no file has room for"),
        "a list": (HEADER | {"b": [1]}, r"tensor 'b' must have dtype, shape and data_offsets, but is \[1\]"),
        "null": (HEADER | {"b": None}, "tensor 'b' must have dtype, shape and data_offsets, but is None"),
        "too few": (HEADER | {"b": {"dtype": "F32"}}, "tensor 'b' must have dtype, shape and data_offsets"),
        "too many": (broken("b", scale=1), "tensor 'b' must have dtype, shape and data_offsets"),
        "twice": (b'{"a": {}, "b": {}, "b": {}}', "'b' comes twice"),
        "dtype twice": (b'{"a": {"dtype": "F32", "dtype": "I32"}}', "'dtype' comes twice"),
        "metadata": (HEADER | {"__metadata__": {"step": 1}}, "__metadata__ must be an object of strings"),
        "metadata list": (HEADER | {"__metadata__": []}, "__metadata__ must be an object of strings"),
        "of lines": (HEADER | {"b\nb": HEADER["a"]}, r"tensors 'a' and 'b\\nb' overlap"),
        "half": (HEADER | {"\ud800": None}, r"tensor '\\ud800' must have"),
        "header list": ([1, 2], r"its header must be an object, not \[1, 2\]"),
        "header text": (b'"a"', "its header must be an object"),
        "deep": (b"[" * 1_000_000, "its header is nested too deep"),
        "deep tensor": (b'{"a": ' + b"[" * 1_000_000, "its header is nested too deep"),
        "digits": (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        "not JSON": (b"{a", "Expecting property name"),
        "not UTF-8": (b'{"\xff": 1}', "'utf-8' codec can't decode"),
        "empty": (b"", "Expecting value"),
    }.values(),
)
def test_a_malformed_header_is_refused_in_one_line(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header)
    (tmp_path / "config.json").write_text("{}")
    for read in (
        lambda: tensor_names(path),
        lambda: resolve_model(str(tmp_path)),
        lambda: list(checkpoint_weights(tmp_path)),
    ):
        with pytest.raises(ValueError, match=message) as refusal:
            read()
        assert str(refusal.value).startswith(f"{path} is not a valid safetensors file: ")
        assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes, too few for the length of a header"),
        (b"1234567", "it has 7 bytes"),
        (bytes(8), "Expecting value"),
        ((2**64 - 1).to_bytes(8, "little"), "its header is longer than the file: 18446744073709551615 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", "its header is longer than the file"),
        ((3).to_bytes(8, "little") + b"{}", "its header is longer than the file: 3 bytes"),
    ],
)
def test_file_shorter_than_its_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tensor_names(tmp_path / "model.safetensors")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^cannot read .*/absent: No such file or directory$"):
        tensor_names(tmp_path / "absent")


@pytest.mark.parametrize(
    ("header", "most_bytes"),
    [
        # Too long a header is not read; the longest one read takes a small multiple of its length.
        (b"[" + b"0," * (50 * 2**20) + b"0]", 2**20),
        pytest.param(
            (b"[" + b"[]," * (MAX_HEADER_BYTES // 3))[: MAX_HEADER_BYTES - 4] + b"0]",
            40 * MAX_HEADER_BYTES,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_header_memory_is_bounded(tmp_path: Path, header: bytes, most_bytes: int) -> None:
    path = write(tmp_path / "model.safetensors", header)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not a valid safetensors file"):
            tensor_names(path)
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


def test_missing_indexed_tensor_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", HEADER)
    assert tensor_names(path, frozenset("a")) == ["a", "b"]
    with pytest.raises(ValueError, match=r"model.safetensors lacks 2 tensors, for example 'c'$"):
        tensor_names(path, frozenset("acd"))


@pytest.mark.parametrize("weight_map", [{"a": 3}, {"a": ["x"]}, {"a": None}, {"a": {}}])
def test_malformed_index_is_refused(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index.json: weight_map must name a file for 'a'"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_deep_json_beside_the_weights_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "model.safetensors", HEADER)
    (tmp_path / file).write_text("[" * 1_000_000)
    with pytest.raises(ValueError, match=f"cannot read .*{file}"):
        resolve_model(str(tmp_path))
    if file == "config.json":
        with pytest.raises(ValueError, match=r"config.json is not JSON"):
            ModelConfig.from_dir(tmp_path)


NUMBERS = st.sampled_from([0, 1, 2, 4, 8, 15, 16, 17, 24, 31, 32, 33, -1, -16, 2**31, 2**63, 2**64, 16.0, True, "16"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NUMBER_LISTS = st.lists(NUMBERS, max_size=3)
TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "I64", "F4", "f32", None, 32]) | ANYTHING,
        "shape": NUMBER_LISTS | ANYTHING,
        "data_offsets": st.sampled_from([[0, 16], [16, 32], [0, 32], [8, 24], [0, 0]]) | NUMBER_LISTS | ANYTHING,
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), TENSORS | ANYTHING, max_size=3)
# Changed values of a valid header get further than random ones.
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), st.sampled_from(["dtype", "shape", "data_offsets"]), st.integers(0, 1), NUMBERS
    ),
    max_size=3,
)


def changed(changes: list[tuple[str, str, int, Any]]) -> dict[str, Any]:
    header: dict[str, Any] = copy.deepcopy(HEADER)
    for name, field, index, value in changes:
        if field == "dtype":
            header[name][field] = value
        else:
            header[name][field][min(index, len(header[name][field]) - 1)] = value
    return header


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HEADERS | CHANGES.map(changed), st.binary(max_size=3), st.integers(0, 2), st.sampled_from([0, 8]))
def test_accepted_headers_match_the_library(
    tmp_path: Path, header: dict[str, Any], noise: bytes, where: int, num_missing: int
) -> None:
    content = bytearray(json.dumps(header).encode())
    position = where * len(content) // 3
    content[position : position + len(noise)] = noise
    path = write(tmp_path / "model.safetensors", bytes(content), DATA[: len(DATA) - num_missing])
    try:
        names = tensor_names(path)
    except ValueError as error:
        assert str(error).startswith(f"{path} is not a valid safetensors file: ") and "\n" not in str(error)
        return
    try:
        with safe_open(path, framework="pt") as file:
            # Tensors without bytes may share their offset.
            assert sorted(names) == sorted(file.offset_keys())
    except SafetensorError:
        # The library may be stricter; the loader then reports it like any unreadable file.
        with pytest.raises(ValueError, match="is not a valid safetensors file"):
            list(checkpoint_weights(tmp_path))
        return
    loaded = dict(checkpoint_weights(tmp_path))
    begins = 0
    for name in names:
        size = loaded[name].nbytes
        assert loaded[name].flatten().view(torch.uint8).numpy().tobytes() == DATA[begins : begins + size]
        begins += size
