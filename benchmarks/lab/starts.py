"""Where a cluster's start goes, and its memory: from what it prints, from its workers' logs and from the kernel."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.served import Served
from tandem.client import TandemClient
from tandem.deploy.host.process_tree import descendants

# Stages of a start that are not the engine's, in the order in which they come.
LAUNCHER, RAY, PROCESSES, REST, JOINING = (
    "launcher",
    "Ray",
    "processes and imports",
    "rest of loading",
    "ports and joining",
)
# What a worker says it does before its engine does anything.
_PROCESS_STAGES = ("starting", "importing")
_PROGRESS = re.compile(r"\s*([\d.]+) s  ([\w-]+): (.+)")
_READY = re.compile(r"Ready after ([\d.]+) s")
_ENGINE = re.compile(r"engine ready: (.+)")
_STAGE = re.compile(r"([^,]+?) ([\d.]+) s(?:, |$)")
_GPU = re.compile(
    r"GPU memory in GiB: (?P<total>[\d.]+) in all, weights and workspaces (?P<weights>[\d.]+), (?P<num_pages>\d+) "
    r"pages (?P<pool>[\d.]+), CUDA graphs (?P<graphs>-?[\d.]+) \((?P<kept>[\d.]+) kept\), largest forward "
    r"(?P<forward>[\d.]+), free (?P<free>[\d.]+)"
)
_STATUS = re.compile(r"^(VmRSS|RssAnon|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


def start_figures(served: Served) -> dict[str, Any]:
    """`stages` in seconds, and `engine` by worker; `gpu_gib` and `rss_mib` by worker or process."""
    logs = {path.stem: path.read_text(errors="replace") for path in sorted(served.log_dir.glob("*.log"))}
    engine = {name: stages for name, text in logs.items() if (stages := engine_stages(text))}
    return {
        "ready_s": served.ready_s,
        "stages": start_stages(served.lines, engine),
        "engine": engine,
        "gpu_gib": {name: memory for name, text in logs.items() if (memory := gpu_memory(text))},
        "rss_mib": resident(served),
    }


def engine_stages(log: str) -> dict[str, float]:
    """Seconds of each stage of a worker's engine, from its log; empty if it has none."""
    found = _ENGINE.search(log)
    return {name: float(took) for name, took in _STAGE.findall(found[1])} if found else {}


def gpu_memory(log: str) -> dict[str, float]:
    """GiB of each part, from a worker's log; empty if it is of a CPU."""
    found = _GPU.search(log)
    return {name: float(value) for name, value in found.groupdict().items()} if found else {}


def start_stages(lines: Sequence[str], engine: dict[str, dict[str, float]]) -> dict[str, float]:
    """Seconds of each stage of the whole start, one after the other, as the worker that was loaded last had them.

    Args:
        lines: which `tandem serve` prints where there is no terminal.
        engine: stages of each worker's engine.
    """
    first: dict[tuple[str, str], float] = {}
    ready_s = 0.0
    for line in lines:
        if found := _READY.match(line):
            ready_s = float(found[1])
        elif found := _PROGRESS.match(line):
            moment, part, doing = float(found[1]), found[2], found[3].partition(" (")[0]
            first.setdefault((part, doing), moment)
    loaded = {part: moment for (part, doing), moment in first.items() if doing == "loaded" and part in engine}
    if not loaded or not ready_s:
        return {}
    last = max(loaded, key=lambda part: loaded[part])
    began_s = min(moment for (part, doing), moment in first.items() if part == last and doing not in _PROCESS_STAGES)
    ray_s, ray_ready_s = first.get(("ray", "starting"), 0.0), first.get(("ray", "ready"), 0.0)
    stages = {LAUNCHER: ray_s, RAY: ray_ready_s - ray_s, PROCESSES: began_s - ray_ready_s, **engine[last]}
    rest = loaded[last] - began_s - sum(engine[last].values())
    return {**stages, REST: max(rest, 0.0), JOINING: ready_s - loaded[last]}


def resident(served: Served) -> dict[str, dict[str, float]]:
    """MiB of each process in memory: all of it, and what of it is its own (anon), files' and shared (shmem)."""
    with TandemClient(served.address) as client:
        info = client.server_info()
    names = {worker.pid: worker.worker_id for worker in info.workers}
    names |= {router.pid: router.router_id for router in info.routers}
    resident: dict[str, dict[str, float]] = {}
    for pid in (served.process.pid, *(process.pid for process in descendants(served.process.pid))):
        of_all = resident.setdefault(names.get(pid, "launcher and Ray"), {})
        for part, mib in memory_of(Path(f"/proc/{pid}/status")).items():
            of_all[part] = of_all.get(part, 0.0) + mib
    return resident


def memory_of(status: Path) -> dict[str, float]:
    """MiB, from a process's status in /proc; empty if it has ended meanwhile."""
    try:
        text = status.read_text()
    except OSError:
        return {}
    return {name.removeprefix("Vm").removeprefix("Rss").lower(): int(kib) / 1024 for name, kib in _STATUS.findall(text)}
