"""A worker runs on the CPUs local to its GPU, or on all of its CPUs if the host names none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.deploy.host.cpu_affinity import cpus_beside, run_beside

PCI_ID = "0000:c1:00.0"


def sysfs(directory: Path, cpu_list: str, pci_id: str = PCI_ID) -> Path:
    """A fake host with one device. Args: cpu_list: content of its local_cpulist."""
    device = directory / "bus/pci/devices" / pci_id
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(cpu_list)
    return directory


@pytest.mark.parametrize("pci_id", [PCI_ID, "0000:C1:00.0", "00000000:C1:00.0"])
def test_the_device_is_found_by_any_spelling_of_its_id(pci_id: str, tmp_path: Path) -> None:
    assert cpus_beside(pci_id, range(8), sysfs(tmp_path, "4-7\n")) == {4, 5, 6, 7}


def test_domains_are_told_apart(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "0-3\n", "0001:c1:00.0")
    assert cpus_beside("00000001:C1:00.0", range(8), root) == {0, 1, 2, 3} and not cpus_beside(PCI_ID, range(8), root)


@pytest.mark.parametrize(
    ("cpu_list", "allowed", "chosen"),
    [
        ("0-1,4-5,7\n", range(8), {0, 1, 4, 5, 7}),
        # Only allowed CPUs; none if there are none.
        ("0-15\n", {2, 3, 20}, {2, 3}),
        ("0-15\n", {16, 17}, set()),
        # All CPUs are local: no need to pin.
        ("0-7\n", range(8), set()),
        ("0-127\n", {3, 4}, set()),
        # The file may be empty, or of an unknown format.
        ("\n", range(8), set()),
        ("all\n", range(8), set()),
    ],
)
def test_local_cpus_are_chosen_from_allowed_ones(
    cpu_list: str, allowed: set[int], chosen: set[int], tmp_path: Path
) -> None:
    assert cpus_beside(PCI_ID, allowed, sysfs(tmp_path, cpu_list)) == chosen


def test_a_host_without_such_files_is_no_error(tmp_path: Path) -> None:
    assert cpus_beside(PCI_ID, range(8), tmp_path) == set()
    assert "runs on all of its" in run_beside(PCI_ID, tmp_path)


def test_too_few_local_cpus_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12, 24)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.append(cpus))
    root = sysfs(tmp_path, "0-14\n")
    assert run_beside(PCI_ID, root) == f"runs on all of its 12 CPUs: only 3 of them are beside {PCI_ID}"
    assert pinned == []
    assert run_beside(PCI_ID, root, min_cpus=3) == f"runs on CPUs 12-14 of its 12, which are beside {PCI_ID}"
    assert all(cpus == {12, 13, 14} for cpus in pinned) and pinned


def test_a_host_that_forbids_it_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(thread: int, cpus: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    said = run_beside(PCI_ID, sysfs(tmp_path, "0-3\n"))
    assert said == f"cannot be kept to the CPUs beside {PCI_ID}: Operation not permitted"


SCRIPT = """
import os, sys, threading
from pathlib import Path
from tandem.deploy.host.cpu_affinity import run_beside
before, ended = threading.Event(), threading.Event()
tids = []
def wait():
    tids.append(threading.get_native_id())
    before.set()
    ended.wait()
thread = threading.Thread(target=wait)
thread.start()
before.wait()
print(run_beside("0000:c1:00.0", Path(sys.argv[1]), min_cpus=1))
later = threading.Thread(target=lambda: tids.append(threading.get_native_id()) or print(os.sched_getaffinity(0)))
later.start()
later.join()
print(os.sched_getaffinity(0), os.sched_getaffinity(tids[0]))
ended.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is no choice")
def test_all_threads_are_pinned_also_earlier_ones(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    root = sysfs(tmp_path, f"{allowed[-1]}\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)], capture_output=True, text=True, timeout=60, check=True
    )
    said, later, both = done.stdout.splitlines()
    assert said == f"runs on CPUs {allowed[-1]} of its {len(allowed)}, which are beside {PCI_ID}"
    only = f"{{{allowed[-1]}}}"
    assert later == only and both == f"{only} {only}"
