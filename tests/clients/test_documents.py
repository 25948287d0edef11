"""Examples in documents run as they stand, with the clients' tested versions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import Served
from tests.clients.environments import INSTALL_TIMEOUT_S
from tests.clients.environments import python as environment_python
from tests.clients.table import CLIENTS

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
PATHS = [path.relative_to(ROOT) for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
HTTP, GRPC = "http://127.0.0.1:8000", "127.0.0.1:50051"


def examples(path: Path) -> dict[str, list[str]]:
    """Returns a document's blocks of Python by the package that they use. A block may use names of earlier ones."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL):
        imported = re.search(r"^from (openai|anthropic|tandem)\b", block, re.MULTILINE)
        found.setdefault(imported[1] if imported else "openai", []).append(block)
    return found


EXAMPLES = [(path, package, "\n".join(blocks)) for path in PATHS for package, blocks in examples(path).items()]


def test_the_documents_have_examples_of_each_package() -> None:
    assert {package for _, package, _ in EXAMPLES} == {"openai", "anthropic", "tandem"}


@pytest.mark.timeout(INSTALL_TIMEOUT_S + TIMEOUT_S)
@pytest.mark.parametrize(("path", "package", "script"), EXAMPLES, ids=lambda value: str(value).split("\n", 1)[0])
def test_examples_run(path: Path, package: str, script: str, served: Served) -> None:
    clients = {client.name: client for client in CLIENTS}
    python = sys.executable if package == "tandem" else str(environment_python(clients[package]))
    script = script.replace(HTTP, served.url).replace(GRPC, served.grpc_address)
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{path}, {package}: {done.stderr[-2000:]}"
    assert done.stdout.strip()
