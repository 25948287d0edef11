"""Facts about a Ray node, checked before a process starts there.

The node may lack our code: Ray sends SENT_MODULES, which import only the standard library.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tandem.engine.kvcache.host_memory import available_memory_bytes
from tandem.hosts import own_addresses

DISTRIBUTION = "tandem-llm"
_CONFIG = "config.json"
_WEIGHTS = ".safetensors"
SENT_MODULES = [sys.modules[name] for name in (__name__, own_addresses.__module__, available_memory_bytes.__module__)]


class NodeFacts(NamedTuple):
    """
    Attributes:
        version: installed version of tandem-llm; "": not installed.
        sources: digest of the importable package; "": none.
        model: digest of config.json and the sizes of the weight files.
        model_error: why the model is unreadable, or "".
        num_cpus: CPUs that a process may use.
    """

    version: str
    sources: str
    model: str
    model_error: str
    addresses: list[tuple[str, str]]
    num_cpus: int
    available_bytes: int


def node_facts(package: str, model_dir: str) -> dict[str, Any]:
    """Returns NodeFacts as a dict: Ray pickles the result, and the node may lack our classes.

    Args:
        package: import name of the cluster's code.
        model_dir: an absolute path.
    """
    model, model_error = _model(Path(model_dir))
    return {
        "version": _version(),
        "sources": _sources(package),
        "model": model,
        "model_error": model_error,
        "addresses": own_addresses(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "available_bytes": available_memory_bytes(),
    }


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _sources(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return ""
    root, digest = Path(found.submodule_search_locations[0]), hashlib.sha256()
    # Path.rglob does not follow a checkout's links to subpackages.
    for path in sorted(
        Path(directory, name) for directory, _, names in os.walk(root, followlinks=True) for name in names
    ):
        if path.suffix == ".py":
            digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _model(directory: Path) -> tuple[str, str]:
    digest = hashlib.sha256()
    try:
        digest.update((directory / _CONFIG).read_bytes())
        for path in sorted(directory.iterdir()):
            if not path.is_file():
                continue
            # Check that it is readable.
            path.open("rb").close()
            if path.suffix == _WEIGHTS:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    except OSError as error:
        return "", f"{error.filename}: {error.strerror}"
    return digest.hexdigest(), ""
