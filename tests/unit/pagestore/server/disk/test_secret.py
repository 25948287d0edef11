import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.secret import adopt_secret, namespace_secret


def test_a_secret_lasts(tmp_path: Path) -> None:
    secret = namespace_secret(tmp_path / "a")
    assert len(bytes.fromhex(secret)) == 32
    assert namespace_secret(tmp_path / "a") == secret
    assert namespace_secret(tmp_path / "b") != secret
    assert stat.S_IMODE((tmp_path / "a" / "secret").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["secret"]


def test_the_store_may_have_the_folder_open(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a")
    assert namespace_secret(tmp_path / "a") == namespace_secret(tmp_path / "a")
    folder.close()


def test_callers_at_once_get_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for i in range(50):
            assert len({*threads.map(namespace_secret, [tmp_path / str(i)] * 8)}) == 1
            assert [path.name for path in (tmp_path / str(i)).iterdir()] == ["secret"]


def test_a_folder_adopts_the_secret_of_another(tmp_path: Path) -> None:
    secret = namespace_secret(tmp_path / "a")
    folder = Folder(tmp_path / "b")
    namespace_secret(tmp_path / "b")
    adopt_secret(tmp_path / "b", secret)
    adopt_secret(tmp_path / "c", secret)
    assert namespace_secret(tmp_path / "b") == namespace_secret(tmp_path / "c") == secret
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["secret"]
    assert stat.S_IMODE((tmp_path / "c" / "secret").stat().st_mode) == 0o600
    folder.close()


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="mode 0755"):
        namespace_secret(tmp_path)


def test_a_readable_or_damaged_secret_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    namespace_secret(folder)
    (folder / "secret").chmod(0o640)
    with pytest.raises(ValueError, match="mode 0640"):
        namespace_secret(folder)
    (folder / "secret").chmod(0o600)
    for length in (0, 31, 33):
        os.truncate(folder / "secret", length)
        with pytest.raises(ValueError, match="is damaged"):
            namespace_secret(folder)
