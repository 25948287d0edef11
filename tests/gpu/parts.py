"""The GPU tests in parts of under eight minutes: `make test-gpu PART=NAME`, or `make test-gpu` for all of them.

Each part prints a row for the table in docs/gpu.md.
"""

import datetime
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

try:
    import pytest
except ModuleNotFoundError:
    sys.exit("make test-gpu needs pytest: run pip install --constraint constraints/base.txt --editable '.[dev]' first")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MAX_PART_S = 480
_PRESSURE = "scenarios/test_engine_under_pressure.py::test_many_steps_leak_no_pages_or_memory"
_ONE_GPU_KILLS = "test_kills.py::test_twenty_kills_on_one_gpu_change_nothing"
_TWO_GPU_KILLS = "test_kills.py::test_ten_kills_between_two_gpus_change_nothing"
# Folders, files and tests below this folder. Each test belongs to one part.
PARTS: dict[str, tuple[str, ...]] = {
    "fp8-products": ("engine/layers/test_fp8_products.py",),
    "layers": (
        "engine/layers/test_cuda_ops.py",
        "engine/layers/test_fp8_quantize.py",
        "engine/layers/test_most_likely.py",
        "engine/layers/test_products.py",
        "engine/weights",
    ),
    "few-rows": ("engine/layers/test_balanced_products.py", "engine/layers/test_few_rows_ring.py"),
    "adapters": ("engine/adapters",),
    "experts": ("engine/layers/experts", "engine/test_build.py", "engine/test_expert_balance.py"),
    "attention": ("engine/attention",),
    "models": ("engine/models",),
    "engine": (
        "engine/draft_models",
        "engine/test_dry_run.py",
        "engine/test_engine.py",
        "engine/test_graph_runner.py",
        "engine/test_prefill_graphs.py",
        "engine/test_prompt_logprobs.py",
        "engine/test_sampler.py",
    ),
    "embeddings": ("engine/test_embeddings.py", "test_embeddings.py"),
    "scenarios": (
        "scenarios/test_engine_under_pressure.py::test_greedy_tokens_match_solo_runs",
        "scenarios/test_overlap.py",
        "scenarios/test_quantized_latents.py",
        "scenarios/test_quantized_pages.py",
    ),
    "speculation": ("scenarios/test_model_drafts.py", "scenarios/test_speculation.py"),
    "pressure-flashinfer": (f"{_PRESSURE}[flashinfer-apart]", f"{_PRESSURE}[flashinfer-mixed]"),
    "pressure-triton": (f"{_PRESSURE}[triton-apart]", f"{_PRESSURE}[triton-mixed]"),
    "cluster": ("engine/kvcache", "kvtransfer", "pagestore", "test_cluster.py"),
    "ranks": (
        "engine/collectives",
        "engine/ranks",
        "scenarios/test_rank_families.py",
        "test_ranks.py::test_ranks_of_unequal_degrees_hand_over",
        "test_ranks.py::test_graphs_of_two_ranks_compute_greedy_tokens",
        "test_ranks.py::test_streams_outlive_each_rank",
        "test_ranks.py::test_pages_of_ranks_come_back_from_the_store",
    ),
    "kills-ranks": ("test_ranks.py::test_streams_outlive_twenty_kills",),
    "stopped-ranks": ("test_ranks.py::test_streams_outlive_stopped_ranks",),
    "kills-store": ("test_store_kills.py",),
    "kills-prefill-1": (f"{_ONE_GPU_KILLS}[prefill-first]",),
    "kills-prefill-2": (f"{_ONE_GPU_KILLS}[prefill-second]",),
    "kills-decode-1": (f"{_ONE_GPU_KILLS}[decode-first]",),
    "kills-decode-2": (f"{_ONE_GPU_KILLS}[decode-second]",),
    "two-gpus-ranks": ("test_ranks.py::test_ranks_on_gpus_of_their_own_end_together",),
    "two-gpus-nvlink": (f"{_TWO_GPU_KILLS}[nvlink-prefill]", f"{_TWO_GPU_KILLS}[nvlink-decode]"),
    "two-gpus-nccl": (f"{_TWO_GPU_KILLS}[nccl-prefill]", f"{_TWO_GPU_KILLS}[nccl-decode]"),
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
    return [
        name
        for name, places in PARTS.items()
        if any(below == place or below.startswith((f"{place}/", f"{place}::", f"{place}[")) for place in places)
    ]


def run_part(name: str, arguments: Sequence[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("make test-gpu needs an NVIDIA GPU and a torch made for CUDA (docs/gpu.md)", file=sys.stderr)
        return 2
    outcomes, began = Outcomes(), time.monotonic()
    places = [str(HERE / place) for place in PARTS[name]]
    status = int(pytest.main(["-m", "gpu", "--durations=5", *places, *arguments], plugins=[outcomes]))
    seconds = time.monotonic() - began
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    print(f"| `{name}` | {outcomes} | {seconds:.0f} s | {_commit()} | {datetime.date.today()} | {gpus} |", flush=True)
    if seconds > MAX_PART_S:
        print(f"part {name} took longer than {MAX_PART_S} s: split it", file=sys.stderr)
        status = status or 1
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
