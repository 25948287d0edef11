"""What is no recording of `tandem trace` is said to be none."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.trace_slices import read_trace

TRACE = {"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "router-0"}}]}
PACKED = gzip.compress(json.dumps(TRACE).encode(), mtime=0)


@pytest.mark.parametrize("content", [PACKED, json.dumps(TRACE).encode()])
def test_it_is_read_compressed_or_not(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(content)
    assert read_trace(tmp_path / "trace") == TRACE


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\0\xff", PACKED[:20], PACKED[:12] + b"\xff\xff" + PACKED[14:], PACKED[:-8] + b"\0" * 8],
)
def test_what_is_damaged_or_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(ValueError, match="trace"):
        read_trace(tmp_path / "trace")
