"""A cluster over two Ray nodes, in two network namespaces.

The tests themselves are in inside_nodes.py, inside_stores.py and inside_wire.py, because clients must run inside a
namespace.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.two_hosts import TOKEN, Node, TwoHosts, may_make_namespaces, two_hosts

TIMEOUT_S = 560.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces are for root"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as found:
        yield found


def passes(hosts: TwoHosts, name: str, tmp_path: Path, on: Node | None = None) -> None:
    """Run tests of a neighboring file on a node, and show their output."""
    node = on or hosts.head
    done = node.run(
        *(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(Path(__file__).with_name(name))),
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "RAY_AUTH_TOKEN": TOKEN,
            "XDG_RUNTIME_DIR": str(tmp_path),
            "TANDEM_TEST_OTHER": f"{hosts.other.namespace} {hosts.other.interface}",
            "TANDEM_TEST_CABLE": f"{hosts.cables[1].switch} {hosts.cables[1].port}",
            "TANDEM_TEST_INTERFACE": node.interface,
            "TANDEM_TEST_DISKS": " ".join(map(str, [node.disk, *(each.own_disk for each in hosts.nodes)])),
        },
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0


def test_prompts_of_one_node_are_decoded_on_the_other(hosts: TwoHosts, tmp_path: Path) -> None:
    passes(hosts, "inside_nodes.py::test_prompts_of_one_node_are_decoded_on_the_other", tmp_path)


def test_internal_tls_hides_traffic_between_nodes(hosts: TwoHosts, tmp_path: Path) -> None:
    """Starts from the other node, so that messages to Ray's head cross the cable."""
    passes(hosts, "inside_wire.py", tmp_path, on=hosts.other)


def test_idle_cluster_ships_within_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    passes(hosts, "inside_nodes.py::test_idle_cluster_ships_within_hosts", tmp_path)


def test_cable_cut_and_mended(hosts: TwoHosts, tmp_path: Path) -> None:
    passes(hosts, "inside_nodes.py::test_cable_cut_and_mended", tmp_path)


def test_logs_come_from_either_node(hosts: TwoHosts, tmp_path: Path) -> None:
    passes(hosts, "inside_nodes.py::test_logs_come_from_either_node", tmp_path)


def test_each_node_has_a_page_store(hosts: TwoHosts, tmp_path: Path) -> None:
    passes(hosts, "inside_stores.py", tmp_path)


# Last, because it replaces the other node.
def test_node_lost_and_restored(hosts: TwoHosts, tmp_path: Path) -> None:
    passes(hosts, "inside_nodes.py::test_node_lost_and_restored", tmp_path)
