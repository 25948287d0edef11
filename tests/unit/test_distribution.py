"""`pip install tandem-llm` installs enough to use a cluster."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.router_model import write_model_dir
from tests.fakes.paced_router import PacedRouter
from tests.unit.test_imports import PACKAGES

ROOT = Path(__file__).parents[2]
DISTRIBUTION = "tandem-llm"
SERVER_PACKAGES = ("torch", "ray", "transformers", "fastapi", "uvicorn", "numpy", "tokenizers", "yaml", "grpc_health")
CLIENT = """
import sys
from tandem.client import TandemClient
with TandemClient(sys.argv[1]) as client:
    tokens = [token for response in client.complete("hi", max_tokens=5) for token in response.token_ids]
print(len(tokens), *sorted({"torch", "ray", "transformers", "fastapi"} & set(sys.modules)))
"""


@dataclass(frozen=True)
class Install:
    """Attributes: bin, packages: its environment's directories; wheel: the installed wheel."""

    bin: Path
    packages: Path
    wheel: Path

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TANDEM"))}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            timeout=60.0,
            cwd=self.bin,
            env={**outside, **environment},
        )


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    # A checkout that was once installed would count as installed, and pip would do nothing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=120.0, env=environment)


def required(requirements: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """Yield the installed distributions of these requirements, recursively."""
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        requirement = waiting.pop()
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        found = importlib.metadata.distribution(requirement.name)
        yield found
        waiting += [Requirement(text) for text in found.requires or ()]


@pytest.fixture(scope="module")
def client_install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """A client's install in its own environment, offline: its requirements are installed here."""
    directory = tmp_path_factory.mktemp("install")
    source = directory / "source"
    # Copy links as links: the wheel must be complete from a checkout.
    for folder in (*PACKAGES, "proto"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(directory), str(source))
    [wheel] = directory.glob("*.whl")
    environment = directory / "environment"
    venv.create(environment, symlinks=True)
    pip("--python", str(environment / "bin/python"), "install", "--no-deps", "--no-index", str(wheel))
    [packages] = environment.glob("lib/python*/site-packages")
    [metadata] = packages.glob("*.dist-info")
    for found in required(importlib.metadata.PathDistribution(metadata).requires or []):
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return Install(environment / "bin", packages, wheel)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running router's address."""
    directory = tmp_path_factory.mktemp("model")
    write_model_dir(directory)
    with PacedRouter(directory, 400) as paced:
        yield paced.addresses.grpc


def test_wheel_has_every_package_file(client_install: Install) -> None:
    with zipfile.ZipFile(client_install.wheel) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {
        str(Path("" if package == "tandem" else "tandem", path.relative_to(ROOT)))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".pyi", ".proto", ".cu", ".cuh", ".html", ".css", ".js", ".svg")
    }
    there.add("tandem/engine/layers/balanced_tiles.json")
    assert packed == there
    assert {name.partition("/")[0] for name in packed} == {"tandem"}


def test_installed_client_uses_a_cluster(client_install: Install, address: str) -> None:
    known = f"import importlib.util; print([m for m in {SERVER_PACKAGES} if importlib.util.find_spec(m)])"
    assert client_install.run("python", "-c", known).stdout == "[]\n"
    called = client_install.run("python", "-c", CLIENT, address)
    assert (called.stdout, called.stderr) == ("5\n", "")
    status = client_install.run("tandem", "status", "--json", TANDEM_ADDRESS=address)
    assert status.returncode == 0 and json.loads(status.stdout)["ready"]
    generated = client_install.run(
        "tandem", "generate", "--raw", "hi", "--max-tokens", "3", "--timings", TANDEM_ADDRESS=address
    )
    assert generated.returncode == 0 and "3 output tokens" in generated.stdout
    measured = client_install.run(
        "tandem", "bench", "--requests", "2", "--input-tokens", "8", "--output-tokens", "3", "--vocab-size", "300",
        TANDEM_ADDRESS=address,
    )  # fmt: skip
    assert measured.returncode == 0 and "2 of 2 requests completed" in measured.stdout
    for command in (("tandem", "--help"), ("tandem", "serve", "--help"), ("tandem", "cache")):
        assert client_install.run(*command, HOME=str(client_install.bin)).returncode == 0


@pytest.mark.parametrize("command", ["serve", "compile"])
def test_serving_without_the_server_extra_names_it(client_install: Install, command: str) -> None:
    for arguments in ((), ("--model", "org/name"), ("--config", "absent.yaml")):
        done = client_install.run("tandem", command, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(rf"tandem {command}: .* pip install '{DISTRIBUTION}\[serve\]'\n", done.stderr)


def test_installed_proto_files_generate_clients(client_install: Install, tmp_path: Path) -> None:
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={client_install.packages}"]
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    subprocess.run([*compiler, *outputs, "tandem/v1/inference.proto"], check=True, timeout=60.0)
    assert (tmp_path / "tandem/v1/inference_pb2_grpc.py").is_file()
