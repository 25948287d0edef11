"""Two network namespaces, each with a node of one Ray: two hosts to the cluster."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.processes import ProcessId
from tests.cluster.conftest import wait_until

TOKEN = "ab" * 32
HEAD, OTHER = "10.77.0.1", "10.77.0.2"
RAY_PORT = 6379
# A router and two workers per node.
NUM_CPUS = 3
NODE_START_S = 90.0
BRIDGE = "switch"


@dataclass
class Node:
    """Attributes: disk: path at which processes of the node see `own_disk`."""

    namespace: str
    interface: str
    address: str
    directory: Path
    disk: Path
    process: subprocess.Popen[bytes] | None = None

    def run(self, *command: str, **options: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(self.command(*command), text=True, **options)  # type: ignore[call-overload]

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def set_link(self, state: str) -> None:
        """Set the interface "up" or "down"."""
        ip("-n", self.namespace, "link", "set", self.interface, state)

    def start(self) -> None:
        is_head = self.address == HEAD
        self.own_disk.mkdir(mode=0o700, exist_ok=True)
        where = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false") if is_head else ()
        log = (self.directory / f"{self.namespace}.log").open("wb")
        with log:
            self.process = subprocess.Popen(
                self.command(
                    # Each `ip netns exec` has its own mounts.
                    *("sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(self.own_disk), str(self.disk)),
                    str(Path(sys.executable).with_name("ray")),
                    *("start", "--block", f"--node-ip-address={self.address}", *where),
                    *(() if is_head else (f"--address={HEAD}:{RAY_PORT}",)),
                    *("--disable-usage-stats", f"--num-cpus={NUM_CPUS}", "--object-store-memory=80000000"),
                    *(f"--temp-dir={self.directory}", f"--labels=rack=of-{self.address}"),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": os.environ.get("HOME", "/"),
                    "RAY_AUTH_MODE": "token",
                    "RAY_AUTH_TOKEN": TOKEN,
                    "RAY_worker_niceness": "0",
                },
            )

    @property
    def own_disk(self) -> Path:
        return self.directory / "disk"

    def is_up(self) -> bool:
        assert self.process is not None and self.process.poll() is None, "its Ray has ended"
        return b"Ray runtime started" in (self.directory / f"{self.namespace}.log").read_bytes()

    def end(self) -> None:
        """Kill all processes at once."""
        if self.process is not None:
            end_processes([*descendants(self.process.pid), ProcessId.of(self.process.pid)], 0.0)
            self.process.wait()
            self.process = None


@dataclass
class Cable:
    """Attributes: switch: the switch's namespace; port: the host's port there."""

    switch: str
    port: str

    def cut(self) -> None:
        """Drop all packets silently."""
        ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "master", BRIDGE)


@dataclass
class TwoHosts:
    nodes: list[Node] = field(default_factory=list)
    cables: list[Cable] = field(default_factory=list)

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def other(self) -> Node:
        return self.nodes[1]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def may_make_namespaces() -> bool:
    name = f"tandem-{os.getpid()}-try"
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0:
            subprocess.run(["ip", "netns", "del", name], check=True)
            return True
    return False


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Create two hosts on a switch with one Ray; deletes everything at exit."""
    hosts = TwoHosts()
    # Ray's socket paths must be short, and interface names have at most 15 characters.
    with contextlib.ExitStack() as stack:
        switch = f"tandem-{os.getpid()}s"
        ip("netns", "add", switch)
        # This also deletes its end of a cable, and the peer.
        stack.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", BRIDGE, "type", "bridge")
        ip("-n", switch, "link", "set", BRIDGE, "up")
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-disk-")))
        for letter, address in (("a", HEAD), ("b", OTHER)):
            made = tempfile.TemporaryDirectory(prefix=f"ray{letter}-", dir="/tmp", ignore_cleanup_errors=True)
            node = Node(f"tandem-{os.getpid()}{letter}", f"td{letter}", address, Path(stack.enter_context(made)), disk)
            ip("netns", "add", node.namespace)
            stack.callback(ip, "netns", "del", node.namespace)
            stack.callback(node.end)
            cable = Cable(switch, f"port{letter}")
            own_end, other_end = (node.interface, "netns", node.namespace), (cable.port, "netns", switch)
            ip("link", "add", *own_end, "type", "veth", "peer", "name", *other_end)
            cable.mend()
            ip("-n", switch, "link", "set", cable.port, "up")
            ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", node.interface)
            ip("-n", node.namespace, "link", "set", "lo", "up")
            node.set_link("up")
            hosts.nodes.append(node)
            hosts.cables.append(cable)
        for node in hosts.nodes:
            node.start()
            wait_until(node.is_up, NODE_START_S, f"the Ray of {node.namespace} is up")
        yield hosts
