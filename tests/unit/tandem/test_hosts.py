"""A host's identity and addresses."""

import os
import subprocess
import sys

import pytest

from tandem.hosts import check_network, choose_address, host_id, interface_of, is_any, is_loopback, own_addresses

ADDRESSES = [("lo", "127.0.0.1"), ("eth0", "192.0.2.7"), ("eth1", "10.1.0.7"), ("eth1", "10.2.0.7")]


def host_id_of_another_process(*wrapper: str) -> str:
    command = (*wrapper, sys.executable, "-c", "from tandem.hosts import host_id; print(host_id())")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_all_processes_of_a_host_name_it_alike() -> None:
    assert host_id() == host_id_of_another_process()


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are for root")
@pytest.mark.parametrize("kind", ["--ipc", "--net"])
def test_namespaces_count_as_separate_hosts(kind: str) -> None:
    if subprocess.run(["unshare", kind, "true"], capture_output=True).returncode:
        pytest.skip("this container makes no namespaces")
    assert host_id() != host_id_of_another_process("unshare", kind)


def test_loopback_is_among_the_addresses() -> None:
    assert ("lo", "127.0.0.1") in own_addresses()
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


@pytest.mark.parametrize(
    ("network", "chosen"),
    [
        ("", "192.0.2.7"),
        ("eth1", "10.1.0.7"),
        ("10.2.0.0/16", "10.2.0.7"),
        # A network given by one of its addresses.
        ("10.2.0.9/16", "10.2.0.7"),
        # Ray's own choice is preferred.
        ("0.0.0.0/0", "192.0.2.7"),
    ],
)
def test_node_address_follows_the_configuration(network: str, chosen: str) -> None:
    assert choose_address(ADDRESSES, network, "192.0.2.7") == chosen


@pytest.mark.parametrize("network", ["ib0", "172.16.0.0/12", "eth"])
def test_missing_interface_error_lists_the_interfaces(network: str) -> None:
    with pytest.raises(ValueError, match=rf"interface {network}: there are 127\.0\.0\.1 \(lo\), 192\.0\.2\.7 \(eth0\)"):
        choose_address(ADDRESSES, network, "192.0.2.7")


def test_malformed_network_is_refused() -> None:
    check_network("10.0.0.0/8")
    check_network("eth0")
    with pytest.raises(ValueError, match=r"interface 10\.0\.0/8 is no IPv4 network"):
        check_network("10.0.0/8")


def test_loopback_and_all_addresses_are_told_apart_from_others() -> None:
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1")] == [True] * 3 + [
        False
    ] * 2
    assert [is_any(h) for h in ("0.0.0.0", "::", "10.0.0.1", "localhost")] == [True, True, False, False]
