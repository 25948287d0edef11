"""GGUF files whose header lies: one line of error, little memory."""

import random
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from tandem.engine.weights.gguf.convert import convert_gguf
from tandem.engine.weights.gguf.header import MAX_ARRAY_ITEMS, MAX_FIELDS, MAX_TENSORS, check_header
from tests.fakes.gguf_files import write_model
from tests.unit.engine.models.test_decoder import Checkpoint
from tests.unit.engine.weights.gguf.test_convert import METADATA, write_gguf

MAX_MEMORY_BYTES = 64 * 2**20
WRONG: tuple[Any, ...] = (True, 2**32 - 1, 0, -1, 1.5, float("nan"), float("inf"), "x", [1, 2], ["a"], [1.5], [True])


def convert(path: Path) -> str:
    """Returns the error, or "" for a model."""
    tracemalloc.start()
    try:
        convert_gguf(path, path.with_suffix(".out"))
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
        return str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MAX_MEMORY_BYTES
    return ""


@pytest.mark.parametrize("num_layers", [3, 100, 2**31 - 1])
def test_layers_that_the_file_does_not_have(tmp_path: Path, num_layers: int) -> None:
    error = convert(write_gguf(tmp_path / "tiny.gguf", {"llama.block_count": num_layers}))
    assert error.endswith(f"llama.block_count is {num_layers}, but the file has tensors of 2 layers")


@pytest.mark.parametrize(
    "key",
    [
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
    ],
)
def test_sizes_that_the_tensors_do_not_have(tmp_path: Path, key: str) -> None:
    for size in (32, 2**31 - 1):
        error = convert(write_gguf(tmp_path / "tiny.gguf", {key: size}))
        assert "has shape" in error or "differs from the head size" in error or "not a multiple" in error


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("place", "key"), list(enumerate(sorted(METADATA))))
def test_metadata_of_another_type_or_range(tmp_path: Path, place: int, key: str, half: int) -> None:
    good = 0
    for number, value in enumerate(WRONG):
        if (number + place) % 2 != half or (isinstance(value, int) and not 0 <= value < 2**32):
            continue
        path = write_gguf(tmp_path / f"{number}.gguf", {key: value})
        good += not convert(path)
    # A value may happen to be right: a token's id, a list of texts.
    assert good <= 4


def with_bytes(tmp_path: Path, change: Callable[[bytearray], None]) -> Path:
    content = bytearray(write_gguf(tmp_path / "good.gguf").read_bytes())
    change(content)
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (4, "<I", 7, "its format has version 7; read are 2, 3"),
        (4, ">I", 3, "its format has version"),
        (8, "<Q", MAX_TENSORS + 1, "it has 16385 tensors, more than 16384"),
        (8, "<Q", 200, "it is truncated|unknown|dimensions|more than"),
        (16, "<Q", MAX_FIELDS + 1, "it has 4097 metadata keys, more than 4096"),
        (24, "<Q", 2**60, "a metadata key has 1152921504606846976 bytes, more than 1024"),
    ],
)
def test_counts_that_cannot_be(tmp_path: Path, offset: int, form: str, value: int, message: str) -> None:
    path = with_bytes(tmp_path, lambda content: struct.pack_into(form, content, offset, value))
    with pytest.raises(ValueError, match=message):
        check_header(path)


def place_of(content: bytearray, name: bytes) -> int:
    """Returns where a tensor's description goes on behind its name."""
    return content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def test_tensors_share_no_data(tmp_path: Path) -> None:
    def overlap(content: bytearray) -> None:
        # Behind the number of dimensions, two of them, and the type.
        struct.pack_into("<Q", content, place_of(content, b"blk.1.ffn_up.weight") + 4 + 16 + 4, 0)

    with pytest.raises(ValueError, match="overlap"):
        check_header(with_bytes(tmp_path, overlap))


def test_tensors_fit_into_the_file(tmp_path: Path) -> None:
    def enlarge(content: bytearray) -> None:
        struct.pack_into("<Q", content, place_of(content, b"blk.1.ffn_down.weight") + 4, 2**40)

    with pytest.raises(ValueError, match=r"beyond the end of the file|overlap"):
        check_header(with_bytes(tmp_path, enlarge))


def write_fields(path: Path, **fields: bytes) -> Path:
    """Writes a file of metadata alone. Args: fields: type and value of each."""
    content = b"".join(struct.pack("<Q", len(name)) + name.encode() + value for name, value in fields.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + content)
    return path


def test_lists_are_bounded_together(tmp_path: Path) -> None:
    sizes = (MAX_ARRAY_ITEMS // 2, MAX_ARRAY_ITEMS // 2 + 1)
    first, second = (struct.pack("<IIQ", 9, 0, size) + bytes(size) for size in sizes)
    error = convert(write_fields(tmp_path / "long.gguf", first=first, second=second))
    assert "second has 1048577 items; all lists together may have 2097152" in error


def test_lists_of_lists_are_refused(tmp_path: Path) -> None:
    deep = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 5000
    assert convert(write_fields(tmp_path / "nested.gguf", deep=deep)).endswith("deep is a list of lists")


@pytest.mark.parametrize("num_files", [60, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["llama", "olmoe"])
def test_any_damage_is_one_line(
    tmp_path: Path, checkpoints: Mapping[str, Checkpoint], model: str, num_files: int
) -> None:
    """Changes bytes of the header, a few at a time."""
    good = tmp_path / "good.gguf"
    if model == "llama":
        write_gguf(good)
    else:
        write_model(good, checkpoints[model].path)
    content = good.read_bytes()
    end_of_header = gguf.GGUFReader(good).data_offset
    rng = random.Random(1)
    num_refused = 0
    for number in range(num_files):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(end_of_header)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        num_refused += bool(convert(path))
    assert num_refused > num_files // 2


@pytest.mark.parametrize("key", [".expert_count", ".expert_used_count", ".expert_weights_norm", ".expert_gating_func"])
def test_keys_of_experts_of_another_type_or_range(
    tmp_path: Path, checkpoints: Mapping[str, Checkpoint], key: str
) -> None:
    num_good = 0
    for number, value in enumerate(WRONG):
        if not isinstance(value, int) or 0 <= value < 2**32:
            error = convert(write_model(tmp_path / f"{number}.gguf", checkpoints["olmoe"].path, {key: value}))
            num_good += not error
            assert not error or f"olmoe{key}" in error
    # A flag may be true, and equals the number 1.
    assert num_good <= 1
