"""The GPU tests in parts of under eight minutes: `make test-gpu PART=NAME`, or `make test-gpu` for all of them.

Each part prints a row for the table in docs/gpu.md.
"""

import datetime
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

try:
    import pytest
except ModuleNotFoundError:
    sys.exit("make test-gpu needs pytest: run pip install --constraint constraints/base.txt --editable '.[dev]' first")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MAX_PART_S = 480
_PRESSURE = "scenarios/test_engine_under_pressure.py::test_many_steps_leak_no_pages_or_memory"
_ONE_GPU_KILLS = "test_kills.py::test_twenty_kills_on_one_gpu_change_nothing"
_RANK_KILLS = "test_ranks.py::test_streams_outlive_twenty_kills"
_TWO_GPU_KILLS = "test_kills.py::test_ten_kills_between_two_gpus_change_nothing"


class Part(NamedTuple):
    """Attributes:
    places: folders, files and tests below this folder. A test belongs to the part that names it most precisely.
    seconds: about how long it takes on a GPU of its own.
    load: share of a GPU that it keeps busy; 1: it measures the GPU's memory and needs it alone.
    num_processes: that run its tests side by side.
    has_clusters: starts workers, which wait for each other's starts on a GPU.
    num_gpus: that its tests need; with fewer, some or all are skipped.
    """

    places: tuple[str, ...]
    seconds: int
    load: float = 0.25
    num_processes: int = 0
    has_clusters: bool = False
    num_gpus: int = 1


PARTS = {
    "fp8-products": Part(("engine/layers/test_fp8_products.py",), 30, num_processes=3),
    "layers": Part(
        (
            "engine/layers/test_cuda_ops.py",
            "engine/layers/test_fp8_quantize.py",
            "engine/layers/test_most_likely.py",
            "engine/layers/test_products.py",
            "engine/weights",
        ),
        90,
        num_processes=3,
    ),
    "few-rows": Part(
        ("engine/layers/test_balanced_products.py", "engine/layers/test_few_rows_ring.py"), 80, num_processes=3
    ),
    "adapters": Part(("engine/adapters",), 90, num_processes=2),
    "experts": Part(
        ("engine/layers/experts", "engine/test_build.py", "engine/test_expert_balance.py"), 90, num_processes=4
    ),
    "attention": Part(("engine/attention",), 375, 0.3, num_processes=4),
    "models": Part(("engine/models",), 200, 0.3, num_processes=4),
    "engine": Part(
        (
            "engine/draft_models",
            "engine/test_engine.py",
            "engine/test_graph_runner.py",
            "engine/test_prefill_graphs.py",
            "engine/test_prompt_logprobs.py",
            "engine/test_sampler.py",
        ),
        190,
        0.3,
    ),
    "memory": Part(
        (
            "engine/test_dry_run.py",
            "engine/test_rehearsal.py",
            "scenarios/test_quantized_pages.py::test_a_pool_of_the_same_share_holds_twice_the_pages",
            "test_cluster.py::test_shares_of_one_gpu_add_up_and_stay",
        ),
        110,
        1.0,
        has_clusters=True,
    ),
    "embeddings": Part(("engine/test_embeddings.py", "test_embeddings.py"), 110, has_clusters=True),
    "scenarios": Part(
        (
            "scenarios/test_engine_under_pressure.py::test_greedy_tokens_match_solo_runs",
            "scenarios/test_overlap.py",
            "scenarios/test_quantized_latents.py",
            "scenarios/test_quantized_pages.py",
        ),
        100,
        num_processes=2,
    ),
    "speculation": Part(("scenarios/test_model_drafts.py", "scenarios/test_speculation.py"), 80, num_processes=3),
    "pressure-flashinfer": Part(
        (f"{_PRESSURE}[flashinfer-apart]", f"{_PRESSURE}[flashinfer-mixed]"), 170, num_processes=2
    ),
    "pressure-triton": Part((f"{_PRESSURE}[triton-apart]", f"{_PRESSURE}[triton-mixed]"), 250, num_processes=2),
    "cluster": Part(
        ("engine/kvcache", "kvtransfer", "pagestore", "test_cluster.py"), 270, has_clusters=True, num_gpus=2
    ),
    "ranks": Part(
        (
            "engine/collectives",
            "engine/ranks",
            "scenarios/test_rank_families.py",
            "test_ranks.py::test_ranks_of_unequal_degrees_hand_over",
            "test_ranks.py::test_graphs_of_two_ranks_compute_greedy_tokens",
            "test_ranks.py::test_streams_outlive_each_rank",
            "test_ranks.py::test_pages_of_ranks_come_back_from_the_store",
        ),
        400,
        0.4,
        has_clusters=True,
    ),
    "kills-ranks-1": Part(tuple(f"{_RANK_KILLS}[{i}]" for i in range(3)), 320, 0.4, has_clusters=True),
    "kills-ranks-2": Part(tuple(f"{_RANK_KILLS}[{i}]" for i in range(3, 5)), 220, 0.4, has_clusters=True),
    "stopped-ranks": Part(("test_ranks.py::test_streams_outlive_stopped_ranks",), 80, 0.4, has_clusters=True),
    "kills-store": Part(("test_store_kills.py",), 240, has_clusters=True),
    "kills-prefill-1": Part((f"{_ONE_GPU_KILLS}[prefill-first]",), 250, has_clusters=True),
    "kills-prefill-2": Part((f"{_ONE_GPU_KILLS}[prefill-second]",), 250, has_clusters=True),
    "kills-decode-1": Part((f"{_ONE_GPU_KILLS}[decode-first]",), 240, has_clusters=True),
    "kills-decode-2": Part((f"{_ONE_GPU_KILLS}[decode-second]",), 240, has_clusters=True),
    "two-gpus-ranks": Part(
        ("test_ranks.py::test_ranks_on_gpus_of_their_own_end_together",), 145, 0.4, has_clusters=True, num_gpus=2
    ),
    "two-gpus-nvlink": Part(
        (f"{_TWO_GPU_KILLS}[nvlink-prefill]", f"{_TWO_GPU_KILLS}[nvlink-decode]"),
        340,
        has_clusters=True,
        num_gpus=2,
    ),
    "two-gpus-nccl": Part(
        (f"{_TWO_GPU_KILLS}[nccl-prefill]", f"{_TWO_GPU_KILLS}[nccl-decode]"),
        350,
        has_clusters=True,
        num_gpus=2,
    ),
}


class Outcomes:
    """Counts a run's tests by outcome, as a pytest plugin."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.counts = {
            name: len(terminalreporter.stats[name])
            for name in ("passed", "failed", "error", "skipped")
            if terminalreporter.stats.get(name)
        }

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.counts.items()) or "no tests"


def parts_of(node_id: str) -> list[str]:
    """Returns the parts of a test. Args: node_id: pytest's, from the repository's root."""
    below = node_id.removeprefix("tests/gpu/")
    lengths = {
        name: max((len(place) for place in part.places if _has(place, below)), default=0)
        for name, part in PARTS.items()
    }
    longest = max(lengths.values())
    return [name for name, length in lengths.items() if length and length == longest]


def _places_within(name: str) -> list[str]:
    """Returns the other parts' places inside those of a part."""
    own = PARTS[name].places
    others = (place for part in PARTS.values() for place in part.places if place not in own)
    return [place for place in others if any(_has(outer, place) for outer in own)]


def _has(place: str, below: str) -> bool:
    return below == place or below.startswith((f"{place}/", f"{place}::", f"{place}["))


def run_part(name: str, arguments: Sequence[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("make test-gpu needs an NVIDIA GPU and a torch made for CUDA (docs/gpu.md)", file=sys.stderr)
        return 2
    outcomes, began = Outcomes(), time.monotonic()
    places = [str(HERE / place) for place in PARTS[name].places]
    excluded = [f"--deselect=tests/gpu/{place}" for place in _places_within(name)]
    status = int(pytest.main(["-m", "gpu", "--durations=5", *excluded, *places, *arguments], plugins=[outcomes]))
    seconds = time.monotonic() - began
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    print(f"| `{name}` | {outcomes} | {seconds:.0f} s | {_commit()} | {datetime.date.today()} | {gpus} |", flush=True)
    if seconds > MAX_PART_S:
        print(f"part {name} took longer than {MAX_PART_S} s: split it if it ran alone", file=sys.stderr)
    return status


def main(arguments: Sequence[str]) -> int:
    """Runs one part, or all of them, each in a process of its own. Args: arguments: the part, then pytest's flags."""
    if arguments and not arguments[0].startswith("-"):
        name, *rest = arguments
        if name not in PARTS:
            print(f"there is no part {name!r}; the parts are {', '.join(PARTS)}", file=sys.stderr)
            return 2
        return run_part(name, rest)
    command = [sys.executable, "-m", "tests.gpu.parts"]
    return max(subprocess.run([*command, name, *arguments], cwd=ROOT, check=False).returncode for name in PARTS)


def _commit() -> str:
    """Returns "" outside a git checkout."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
