import mmap
import threading
import time
from pathlib import Path

import pytest

from tandem.pagestore.server.disk import opened_folder
from tandem.pagestore.server.disk.folder import Folder, FolderInUse
from tandem.pagestore.server.disk.opened_folder import OpenedFolder, purge_folder
from tests.fakes.disk_pages import NUM_SLOTS, PAGE_BYTES, PAGE_FORMAT


def opened(directory: Path, max_bytes: int = 2**24, *, is_closing: bool = False) -> OpenedFolder:
    return OpenedFolder.open(
        directory,
        max_bytes,
        PAGE_FORMAT,
        mmap.mmap(-1, NUM_SLOTS * PAGE_BYTES),
        threading.Lock(),
        lambda: is_closing,
        make=True,
        namespace_secret="",
    )


def test_a_folder_that_is_refused_is_free_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="raise its size"):
        opened(tmp_path / "pages", 1)
    opened(tmp_path / "pages").close()


def test_a_folder_in_use_is_waited_for_until_the_caller_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path / "pages")
    began = time.monotonic()
    with pytest.raises(FolderInUse):
        opened(tmp_path / "pages", is_closing=True)
    assert time.monotonic() - began < opened_folder.IN_USE_LIMIT_S
    monkeypatch.setattr(opened_folder, "IN_USE_LIMIT_S", 0.1)
    with pytest.raises(FolderInUse):
        opened(tmp_path / "pages")
    first.close()
    opened(tmp_path / "pages").close()


def test_a_folder_is_purged_without_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "pages"
    with pytest.raises(FileNotFoundError):
        purge_folder(directory)
    folder = Folder(directory)
    monkeypatch.setattr(opened_folder, "IN_USE_LIMIT_S", 0.05)
    with pytest.raises(FolderInUse):
        purge_folder(directory)
    folder.close()
    purge_folder(directory)
    again = Folder(directory)
    assert (again.num_purges, again.name) == (1, folder.name)
    again.close()
