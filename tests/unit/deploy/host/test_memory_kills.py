from pathlib import Path

from tandem.deploy.host.memory_kills import RECENT_S, MemoryKills
from tests.fakes.clock import FakeClock


def test_a_new_kill_is_named(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 2\n")
    kills = MemoryKills((tmp_path / "absent", vmstat))
    assert kills.explanation() == ""
    vmstat.write_text("nr_free_pages 1\noom_kill 3\n")
    assert "killed a process here for memory (SIGKILL, oom_kill 3)" in kills.explanation()
    assert kills.explanation() == ""
    vmstat.write_text("oom_kill 5\n")
    assert "killed 2 processes here" in kills.explanation()


def test_a_container_counts_its_own(tmp_path: Path) -> None:
    own, vmstat = tmp_path / "memory.events", tmp_path / "vmstat"
    own.write_text("low 0\noom 1\noom_kill 1\noom_group_kill 0\n")
    vmstat.write_text("oom_kill 9\n")
    kills = MemoryKills((own, vmstat))
    vmstat.write_text("oom_kill 10\n")
    assert kills.explanation() == ""


def test_without_a_count_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("oom_kill many\n")
    assert MemoryKills((tmp_path / "absent", tmp_path / "odd")).explanation() == ""


def test_an_old_kill_explains_no_death(tmp_path: Path) -> None:
    vmstat, clock = tmp_path / "vmstat", FakeClock()
    vmstat.write_text("oom_kill 2\n")
    kills = MemoryKills((vmstat,), clock)
    vmstat.write_text("oom_kill 3\n")
    for _ in range(int(RECENT_S) + 3):
        clock.advance(1.0)
        kills.look()
    assert kills.explanation() == ""
    # One that was seen before its death was noticed does.
    vmstat.write_text("oom_kill 4\n")
    clock.advance(3.0)
    kills.look()
    clock.advance(1.0)
    assert "killed a process here" in kills.explanation()
