from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.store_options import parse_disk, parse_size
from tandem.pagestore.config import StoreDisk


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1KiB", 2**10), ("64GiB", 2**36), ("3 MiB", 3 * 2**20), ("2TiB", 2**41)]
)
def test_sizes_have_binary_units(text: str, num_bytes: int) -> None:
    assert parse_size("size", text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "64", "64GB", "0GiB", "-1GiB", "1.5GiB", "GiB", "64gib", "64GiB ", "٣GiB", "1e3GiB", "9" * 16 + "KiB"]
)
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"^size must be a size such as 64GiB"):
        parse_size("size", text)


def test_a_directory_may_have_colons_and_is_made_absolute() -> None:
    assert parse_disk("disk", "/a:b:1KiB") == StoreDisk("/a:b", 1024)
    assert parse_disk("disk", "pages:1KiB").directory == str(Path("pages").absolute())


@pytest.mark.parametrize("text", ["", ":", ":1KiB", "1KiB", "/d"])
def test_a_disk_needs_a_directory_and_a_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"^disk must be a directory and a size, such as"):
        parse_disk("disk", text)


def test_a_store_gets_its_own_address_and_the_cluster_s_keys() -> None:
    config = ClusterConfig(
        "m", store_memory="1MiB", store_disk="/d:1KiB", store_namespace_share=0.25, api_keys=("key",)
    )
    store = config.store("store-0", "127.0.0.1:99", ("127.0.0.1:98",), "/socket", "token")
    assert (store.host, store.port, store.region_socket) == ("127.0.0.1", 99, "/socket")
    assert store.routers == ("127.0.0.1:98",)
    assert store.disk == config.disk == StoreDisk("/d", 1024)
    assert (store.namespace_share, ClusterConfig("m").store_namespace_share) == (0.25, 1.0)
    assert (store.cluster_token, store.api_keys) == ("token", ("key",))
    assert (config.store_memory_bytes, ClusterConfig("m").store_memory_bytes) == (2**20, 0)
