"""Whether processes of the tandem that is installed now may join this cluster, which may run an earlier one."""

import json
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from tandem import __version__
from tandem.messages import PROTOCOL_VERSION

CHECK_TIMEOUT_S = 60.0


def described() -> dict[str, Any]:
    """Returns this process's version, protocol version, and the fields of what a launcher tells its processes."""
    from tandem.deploy.config.cluster_config import WorkerPlan
    from tandem.pagestore.config import StoreConfig
    from tandem.router.config import RouterConfig

    return {
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "orders": {kind.__name__: sorted(_field_names(kind)) for kind in (RouterConfig, StoreConfig, WorkerPlan)},
    }


def _field_names(kind: Any, prefix: str = "") -> list[str]:
    """Returns the names of all fields, those of nested dataclasses included."""
    names = []
    types = get_type_hints(kind)
    for field in fields(kind):
        names.append(prefix + field.name)
        if is_dataclass(types[field.name]):
            names += _field_names(types[field.name], f"{prefix}{field.name}.")
    return names


class CheckInstalled:
    """Asks the installed tandem in a process of its own: this process has loaded another one, perhaps.

    A process that does not answer in time is killed, which counts as a refusal.
    """

    def __init__(self, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._deadline = time.monotonic() + timeout_s
        # A file of this folder would be found before the installed package.
        command = [sys.executable, "-P", "-c", "from tandem.deploy.supervise import installed; installed.main()"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def refusal(self) -> str | None:
        """Returns the reason not to start a process anew, or ""; None while it is not known."""
        if self._process.poll() is None:
            if time.monotonic() < self._deadline:
                return None
            self._process.kill()
        output, errors = self._process.communicate()
        if self._process.returncode:
            said = errors.strip().splitlines()[-1:] or [f"exit status {self._process.returncode}"]
            return f"the installed tandem does not start: {said[0]}"
        try:
            return difference(described(), json.loads(output))
        except (ValueError, KeyError, TypeError):
            return "the installed tandem does not describe itself as this one asks: stop and start the cluster"

    def give_up(self) -> None:
        self._process.kill()
        self._process.wait()


def difference(running: dict[str, Any], installed: dict[str, Any]) -> str:
    """Returns why processes of the installed version cannot join those that run, or ""."""
    versions = f"the installed tandem {installed['version']} cannot join the running {running['version']}"
    advice = "stop and start the cluster, or run a second one and move the clients"
    if installed["protocol"] != running["protocol"]:
        return f"{versions}: its protocol version is {installed['protocol']}, not {running['protocol']}; {advice}"
    if installed["orders"] != running["orders"]:
        return f"{versions}: its processes take other options; {advice}"
    return ""


def main() -> None:
    print(json.dumps(described()))
