"""Each client's environment, kept per version."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.clients.table import SCRIPTS, Client

INSTALL_TIMEOUT_S = 900


def python(client: Client) -> Path:
    """Return the Python of the client's environment, made first if it is missing."""
    directory = _directory(client)
    found = directory / "bin" / "python"
    if not (directory / ".done").exists():
        _run(sys.executable, "-m", "venv", str(directory))
        _run(str(found), "-m", "pip", "install", "--quiet", *client.requirements)
        (directory / ".done").touch()
    return found


def command(client: Client) -> list[str]:
    """Return the command that runs the client's script in its environment."""
    if not client.is_for_node:
        return [str(python(client)), str(SCRIPTS / client.script)]
    # Node looks for packages beside the script.
    copied = _node_packages(client).parent / client.script
    copied.write_text((SCRIPTS / client.script).read_text())
    return ["node", str(copied)]


def version(client: Client) -> str:
    """Return the installed version of the client's package."""
    if client.is_for_node:
        found: str = json.loads((_node_packages(client) / client.package / "package.json").read_text())["version"]
        return found
    return _run(
        str(python(client)), "-c", f"import importlib.metadata as m; print(m.version({client.package!r}))"
    ).strip()


def _node_packages(client: Client) -> Path:
    directory = _directory(client)
    if not (directory / ".done").exists():
        directory.mkdir(parents=True, exist_ok=True)
        _run("npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(directory), *client.requirements)
        (directory / ".done").touch()
    return directory / "node_modules"


def _directory(client: Client) -> Path:
    kept_in = Path(os.environ.get("TANDEM_CLIENTS_DIR", ".clients")).absolute()
    return kept_in / re.sub(r"[^A-Za-z0-9.=-]+", "_", "+".join(client.requirements))


def _run(*arguments: str) -> str:
    done = subprocess.run(arguments, check=True, timeout=INSTALL_TIMEOUT_S, stdout=subprocess.PIPE, text=True)
    return done.stdout
