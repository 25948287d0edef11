"""This host's page store, without its process."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ClientAddresses, ClusterPorts
from tandem.deploy.host.store_folder import open_disk
from tandem.deploy.supervise import stores as module
from tandem.deploy.supervise.stores import Stores
from tandem.pagestore.config import StoreDisk
from tandem.pagestore.region_client import take_region
from tandem.pagestore.server.disk.folder import Folder
from tandem.router.config import RouterAddresses

PORTS = ClusterPorts(
    ClientAddresses("", ""), {"router-0": RouterAddresses("", "", "127.0.0.1:98")}, store="127.0.0.1:99"
)
CONFIG = ClusterConfig("m", store_memory="1MiB", store_write_after=3, api_keys=("old",))


def test_the_region_is_there_until_the_cluster_stops(tmp_path: Path) -> None:
    stores = Stores()
    assert stores.access is None and not stores.kinds(lambda name: None)
    stores.open(CONFIG, tmp_path / "private", PORTS, "token")
    assert stores.access is not None
    assert (stores.access.address, stores.access.write_after) == ("127.0.0.1:99", 3)
    path = Path(stores.access.region_socket)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert take_region(path, "token").region.num_bytes == 2**20
    with pytest.raises(PermissionError):
        take_region(path, "another")
    stores.close()
    stores.close()
    assert not path.exists()


def test_a_restarted_store_gets_the_newest_keys(tmp_path: Path) -> None:
    stores = Stores()
    stores.open(CONFIG, tmp_path, PORTS, "token", "secret")
    config = stores.config("store-0", 2, None, ["new"])
    assert (config.num_restarts, config.api_keys, config.port) == (2, ("new",), 99)
    assert config.namespace_secret == "secret" and "secret'" not in repr(config)
    assert config.routers == ("127.0.0.1:98",)
    kinds = stores.kinds(lambda name: f"started {name}")
    assert kinds.keys() == {"store-0"} and kinds["store-0"].start("store-0") == "started store-0"
    stores.close()


def test_others_directories_and_too_little_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Stores()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError):
        stores.open(CONFIG, shared, PORTS, "token")
    available: Any = lambda: 2**19  # noqa: E731
    monkeypatch.setattr(module, "available_memory_bytes", available)
    with pytest.raises(ValueError, match="store_memory is"):
        stores.open(CONFIG, tmp_path, PORTS, "token")
    assert stores.access is None


def test_a_folder_is_opened_for_its_secret_and_left_to_the_store(tmp_path: Path) -> None:
    disk = StoreDisk(str(tmp_path / "pages"), 2**30)
    secret = open_disk(disk)
    assert len(secret) == 64 and open_disk(disk) == secret
    store = Folder(Path(disk.directory))
    with pytest.raises(ValueError, match="is in use by another page store"):
        open_disk(disk)
    store.close()


def test_a_size_beyond_the_free_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pages"
    open_disk(StoreDisk(str(folder), 2**20))
    (folder / "segment-000000000000.pages").write_bytes(bytes(2**20))
    about = SimpleNamespace(f_bavail=2**18, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: about)
    # Pages of before leave for new ones.
    open_disk(StoreDisk(str(folder), 2**30 + 2**20))
    message = (
        rf"^store_disk may take 2.00 GiB in {folder}, but only 1.00 GiB are free there, pages of before included: "
        "use a smaller size, or free space$"
    )
    with pytest.raises(ValueError, match=message):
        open_disk(StoreDisk(str(folder), 2**31))


def test_a_folder_of_others_or_on_a_failing_disk_is_refused_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"give it owner .* and mode 0700"):
        open_disk(StoreDisk(str(tmp_path), 2**30))
    message = r"^/proc/pages cannot be used as a folder of pages \([^\n]*\): name another in store_disk$"
    with pytest.raises(ValueError, match=message):
        open_disk(StoreDisk("/proc/pages", 2**30))
