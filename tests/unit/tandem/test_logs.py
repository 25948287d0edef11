"""Log files and levels."""

import errno
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config import LogConfig
from tandem.logs import configure

# A process that is configured like one of the cluster and logs at every level.
SCRIPT = """
import logging, sys
from tandem.config import LogConfig
from tandem.logs import configure
configure(sys.argv[1], LogConfig(sys.argv[2], sys.argv[3]))
for name in ("tandem.worker.process", "tandem.router.router", "tandem.decode_worker.scheduler", "httpcore.http11"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)("%s said %s", name, level)
"""


def run(name: str, level: str, directory: str) -> str:
    """Return the process's standard error."""
    command = [sys.executable, "-c", SCRIPT, name, level, directory]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stderr


def said(text: str) -> set[tuple[str, str]]:
    return {(line.split()[2], line.rpartition(" said ")[2]) for line in text.splitlines()}


@pytest.mark.parametrize(
    ("level", "ours", "libraries"),
    [
        ("debug", ("debug", "info", "warning", "error"), ("info", "warning", "error")),
        ("info", ("info", "warning", "error"), ("info", "warning", "error")),
        ("error", ("error",), ("error",)),
    ],
)
def test_level_applies_to_cluster_loggers(level: str, ours: tuple[str, ...], libraries: tuple[str, ...]) -> None:
    names = ("tandem.worker.process", "tandem.router.router", "tandem.decode_worker.scheduler")
    expected = {(name, word) for name in names for word in ours} | {("httpcore.http11", word) for word in libraries}
    assert said(run("prefill-0", level, "")) == expected


def test_each_process_appends_to_a_file_of_its_own(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there"
    assert run("prefill-0", "info", str(directory)) == ""
    first = (directory / "prefill-0.log").read_text()
    assert ("tandem.router.router", "info") in said(first)
    run("prefill-0", "info", str(directory))
    run("decode-0", "error", str(directory))
    both_lives = (directory / "prefill-0.log").read_text()
    assert both_lives.startswith(first) and len(both_lives) == 2 * len(first)
    assert {word for _, word in said((directory / "decode-0.log").read_text())} == {"error"}


def test_a_long_log_begins_anew_and_one_older_is_kept(tmp_path: Path) -> None:
    script = SCRIPT.replace("configure(", "tandem.logs.MAX_BYTES = 2_000; configure(", 1).replace(
        "import logging, sys", "import logging, sys, tandem.logs"
    )
    for _ in range(20):
        subprocess.run([sys.executable, "-c", script, "router-0", "info", str(tmp_path)], check=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router-0.log", "router-0.log.1"]
    older, newer = ((tmp_path / name).read_text() for name in ("router-0.log.1", "router-0.log"))
    assert 0 < len(newer) <= 2_000 and len(older) <= 2_000
    one_life = run("router-0", "info", "").splitlines()
    words = [line.rpartition(" said ")[2] for line in (older + newer).splitlines()]
    # No line is lost between the two.
    whole = [line.rpartition(" said ")[2] for line in one_life] * 20
    assert words == whole[-len(words) :]


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write the log .*file/prefill-0\.log: .*choose another log_dir"):
        configure("prefill-0", LogConfig(directory=str(tmp_path / "file")))


def test_a_full_disk_is_reported_once_until_a_write_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("tandem")
    before = root.handlers[:], root.level, ours.level
    root.handlers.clear()
    try:
        configure("router-0", LogConfig("info", str(tmp_path)))
        (handler,) = root.handlers
        assert isinstance(handler, logging.FileHandler)
        assert handler.stream is not None
        write = handler.stream.write

        def is_full(text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        for is_writable in (False, False, True, False):
            monkeypatch.setattr(handler.stream, "write", write if is_writable else is_full, raising=False)
            ours.warning("a line")
        line = f"tandem: cannot write the log {tmp_path}/router-0.log: No space left on device"
        assert capsys.readouterr().err.splitlines() == [line, line]
        handler.close()
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        ours.setLevel(before[2])
