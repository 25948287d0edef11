"""Every gRPC option that this repository sets is one that the installed library knows: it ignores others silently."""

import ast
from pathlib import Path
from typing import TypeGuard

from grpc._cython import cygrpc

ROOT = Path(__file__).parents[4]
# Not followed: the packages' links in tandem/ and an environment beside them.
FOLDERS = (
    *("benchmarks", "both_worker", "decode_worker", "deploy", "engine", "kvtransfer", "prefill_worker", "router"),
    *("tandem", "tests", "worker"),
)


def option_keys(source: str) -> set[str]:
    """Return the first items of all pairs whose first item is a string of gRPC's option namespace. Pairs of two such
    strings are other names.
    """
    pairs = [node.elts for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Tuple) and len(node.elts) == 2]
    return {first.value for first, second in pairs if _is_key(first) and not _is_key(second)}


def _is_key(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("grpc.")


def keys_of_repository() -> dict[str, str]:
    """Return each key with one file that sets it."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if not file.is_symlink()]
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    # Few files name a key, and all the others take seconds to parse.
    return {key: file for file, source in sources.items() if '"grpc.' in source for key in option_keys(source)}


def is_known(key: str, library: bytes) -> bool:
    # The library's C strings end with a zero byte.
    return key.encode() + b"\0" in library


def test_keys_are_found() -> None:
    source = 'OPTIONS = [("grpc.a", 1), *[("grpc.b", x)], ("other", 2), "grpc.c", ("grpc.d", "grpc.e")]'
    assert option_keys(source) == {"grpc.a", "grpc.b"}


def test_library_knows_every_option() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    assert not is_known("grpc.http2.min_recv_ping_interval_without_data_ms", library)
    keys = keys_of_repository()
    assert len(keys) > 10 and keys["grpc.keepalive_time_ms"]
    assert {key: file for key, file in keys.items() if not is_known(key, library)} == {}, "grpc ignores these"
