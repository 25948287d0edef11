import os
import stat
from pathlib import Path

import pytest

from tandem.pagestore.server.disk.folder import Folder, open_folder


def test_a_folder_keeps_its_name_and_counts_purges(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "parent" / "pages")
    name = folder.name
    assert folder.num_purges == 0
    folder.num_purges += 2
    folder.record_purges()
    assert folder.num_recorded == 2
    folder.sync()
    folder.close()
    again = Folder(tmp_path / "parent" / "pages")
    assert (again.name, again.num_purges) == (name, 2)
    again.close()
    assert stat.S_IMODE((tmp_path / "parent" / "pages").stat().st_mode) == 0o700
    other = Folder(tmp_path / "other")
    assert other.name != name
    other.close()


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o755, 0o777])
def test_a_folder_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match=f"has owner {os.getuid()} and mode {mode:04o}.*mode 0700"):
        Folder(tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ValueError, match="has owner 12345"):
        open_folder(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file cannot be used as a folder of pages \(not a folder\)"):
        open_folder(tmp_path / "file")


def test_a_refused_folder_leaves_no_lock(tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    folder = Folder(tmp_path / "pages")
    for _ in range(3):
        with pytest.raises(ValueError, match="is in use"):
            Folder(tmp_path / "pages")
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == num_open  # noqa: PTH208


@pytest.mark.parametrize("length", range(29))
def test_a_record_cut_short_makes_a_new_name(tmp_path: Path, length: int) -> None:
    folder = Folder(tmp_path / "pages")
    name = folder.name
    folder.close()
    os.truncate(tmp_path / "pages" / "state", length)
    for _ in range(2):
        again = Folder(tmp_path / "pages")
        assert (again.name == name) == (length == 28)
        again.close()
        name, length = again.name, 28
