"""What the figures of a report are of: the machine and the versions."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

from benchmarks.served import ROOT
from tandem import __version__

_TIMEOUT_S = 15.0
_PACKAGES = ("torch", "grpcio", "ray", "flashinfer-python", "triton")


def describe_machine() -> dict[str, str]:
    """By what it is, in words."""
    memory_kib = int(_found(r"MemTotal:\s+(\d+)", Path("/proc/meminfo")) or 0)
    described = {
        "processor": _found(r"model name\s*: (.+)", Path("/proc/cpuinfo")) or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "load before the start": current_load(),
        "system": f"{platform.system()} {platform.release()}",
    }
    gpus = _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()
    return described | ({"GPUs": f"{len(gpus)} x {gpus[0]}"} if gpus else {})


def current_load() -> str:
    """The average of a minute: what the machine has to do, the benchmark's own part included."""
    return f"{os.getloadavg()[0]:.2f}"


def describe_versions() -> dict[str, str]:
    """Of Tandem, with its commit where it is known, and of what it runs on."""
    commit = _said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    versions = {"tandem": f"{__version__}{f' ({commit})' if commit else ''}", "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _found(pattern: str, file: Path) -> str:
    found = re.search(pattern, file.read_text())
    return found[1].strip() if found else ""


def _said(*command: str) -> str:
    """What it prints; "" if it fails or there is no such command."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
