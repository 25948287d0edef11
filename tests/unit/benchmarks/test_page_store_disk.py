from pathlib import Path

from benchmarks import page_store_disk


def test_the_disk_benchmark_measures_every_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    rows = [*page_store_disk.transfers(tmp_path, 1 << 19, 1 << 23, 2)]
    rows += page_store_disk.start(tmp_path / "start", 1 << 21, 300)
    # The process of all tests can also shrink meanwhile.
    assert [row.name for row in rows if row.value < 0 and row.name != "memory"] == []
    assert len({row.name for row in rows}) == 12
