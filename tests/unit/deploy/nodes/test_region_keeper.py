"""The owner of a node's region, without Ray."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.host.store_folder import open_disk
from tandem.deploy.nodes import region_keeper
from tandem.deploy.nodes.region_keeper import KeptRegion, RegionKeeper, RegionOrder
from tandem.deploy.on_ray.sealed import KeyPair
from tandem.pagestore.config import StoreDisk
from tandem.pagestore.region_client import take_region
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.secret import namespace_secret

ORDER = RegionOrder(2**20, "127.0.0.1:0", "", "token")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(region_keeper, "default_directory", lambda: tmp_path / "private")
    monkeypatch.setattr(region_keeper, "own_rack", lambda: "rack-1")
    return tmp_path / "private"


@pytest.fixture
def keeper() -> Iterator[RegionKeeper]:
    made = RegionKeeper(ORDER)
    yield made
    made.stop()


def test_a_keeper_holds_memory_and_port_until_it_stops(keeper: RegionKeeper, directory: Path) -> None:
    kept = KeptRegion(*keeper.start())
    assert kept.rack == "rack-1" and kept.folder == ""
    assert Path(kept.socket).parent == directory
    assert take_region(Path(kept.socket), "token").region.num_bytes == 2**20
    assert keeper.num_untouched_bytes() == 2**20 and keeper.namespace_secret(KeyPair().public_key) == b""
    host, _, port = kept.address.partition(":")
    with socket.socket() as other, pytest.raises(OSError):
        other.bind((host, int(port)))
    keeper.stop()
    keeper.wait_ended()
    assert not Path(kept.socket).exists()


def test_a_replacement_has_the_same_address_and_another_region(keeper: RegionKeeper) -> None:
    kept = KeptRegion(*keeper.start())
    first = take_region(Path(kept.socket), "token")
    # The dead keeper's port and socket.
    keeper._ports.close()
    again = RegionKeeper(replace(ORDER, address=kept.address, socket=kept.socket))
    assert KeptRegion(*again.start())[:2] == (kept.address, kept.socket)
    assert take_region(Path(kept.socket), "token").region_id != first.region_id
    again.stop()


def test_sockets_of_dead_keepers_are_removed(keeper: RegionKeeper, directory: Path) -> None:
    directory.mkdir(mode=0o700)
    # No process has this pid.
    dead, foreign = directory / "4194305-1.region", directory / "notes.region"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(dead))
    foreign.touch()
    keeper.start()
    assert not dead.exists() and foreign.exists()


def test_a_folder_s_secret_is_sealed_and_adopted_elsewhere(tmp_path: Path) -> None:
    disks = [StoreDisk(str(tmp_path / name), 2**30) for name in ("a", "b")]
    before = open_disk(disks[1])
    first = RegionKeeper(replace(ORDER, disk=disks[0]))
    kept = KeptRegion(*first.start())
    keys = KeyPair()
    secret = keys.open(first.namespace_secret(keys.public_key)).decode()
    assert secret == namespace_secret(tmp_path / "a") != before
    first.stop()
    second = RegionKeeper(replace(ORDER, disk=disks[1], namespace_secret=secret))
    other = KeptRegion(*second.start())
    assert namespace_secret(tmp_path / "b") == secret and other.folder != kept.folder
    second.stop()
    # The store of the cluster holds the folder.
    folder = Folder(tmp_path / "b")
    again = RegionKeeper(
        replace(ORDER, disk=disks[1], namespace_secret=secret, address=other.address, socket=other.socket)
    )
    again.start()
    again.stop()
    folder.close()


def test_a_node_without_the_memory_refuses(monkeypatch: pytest.MonkeyPatch, keeper: RegionKeeper) -> None:
    monkeypatch.setattr(region_keeper, "available_memory_bytes", lambda: 2**19)
    with pytest.raises(ValueError, match=r"^store_memory is"):
        keeper.start()
