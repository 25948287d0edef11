"""What a node of Ray's is asked before anything of the cluster is started there.

It runs on nodes that may have none of our code, so Ray sends SENT_MODULES along, which import the standard library
alone.
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
# This one and those of ours that it imports.
SENT_MODULES = [sys.modules[name] for name in (__name__, own_addresses.__module__, available_memory_bytes.__module__)]


class NodeFacts(NamedTuple):
    """
    Attributes:
        version: of our distribution there; "": it is not installed.
        sources: a digest of the code that an actor would import there; "" if there is none.
        model: a digest of the model's configuration, and of the sizes of its weights' files. (What the weights are a
            worker finds out when it has loaded them.)
        model_error: why the model's directory cannot be used there, or "".
        addresses: as tandem.hosts has them.
        num_cpus: that a process may run on there.
        available_bytes: memory that pools could take there.
    """

    version: str
    sources: str
    model: str
    model_error: str
    addresses: list[tuple[str, str]]
    num_cpus: int
    available_bytes: int


def node_facts(package: str, model_dir: str) -> dict[str, Any]:
    """The facts of this host, by their names: what is pickled must need no class of ours.

    Args:
        package: the cluster's code.
        model_dir: what workers and routers read, as an absolute path.
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
    # In a checkout the subpackages are links, which Path.rglob does not follow.
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
            # Whether it can be read is for the operating system to say.
            path.open("rb").close()
            if path.suffix == _WEIGHTS:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    except OSError as error:
        return "", f"{error.filename}: {error.strerror}"
    return digest.hexdigest(), ""
