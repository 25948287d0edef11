"""Times sums over the ranks of a worker: the kernels between GPUs that map each other's memory, and NCCL.

Each rank is a process, on a GPU of its own as far as there are any. Ranks that share one take turns on it, which is
what their times show, and NCCL refuses them. Needs CUDA.
"""

import sys
from collections.abc import Callable, Sequence
from typing import cast

import torch

from benchmarks.kernels.graph_time import NUM_RUNS, median_us
from benchmarks.rows import Row, argument_parser, report
from tandem.engine.config import EngineConfig
from tandem.engine.ranks.group import RankGroup
from tandem.worker.base import WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks.processes import RankProcesses
from tandem.worker.ranks.seat import Seat
from tandem.worker.ranks.serving import use_device

NUM_ROWS = (1, 8, 32, 128, 512, 2048, 8192)
# In a graph, or launched one after the other.
NUM_SUMS = 20
STOP_TIMEOUT_S = 30.0


def measure(group: RankGroup, hidden_size: int) -> list[Row]:
    """Every rank calls it. Returns microseconds of one sum of (rows, hidden_size) bfloat16 with its residual."""
    from tandem.engine.collectives.cuda_ipc import CudaIpcCollectives
    from tandem.engine.collectives.nccl import NcclSums

    use_device("cuda", group.ranks)
    device = torch.device("cuda", torch.cuda.current_device())
    gpus = group.gathered(str(torch.cuda.get_device_properties(device).uuid))
    nccl = NcclSums(group, device) if len(set(gpus)) == len(gpus) else None
    own = CudaIpcCollectives(group, device)
    rows = []
    for num_rows in NUM_ROWS:
        x, residual = torch.zeros(2, num_rows, hidden_size, dtype=torch.bfloat16, device=device)
        what = f"{num_rows} x {hidden_size}"

        def by_kernel(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            for _ in range(NUM_SUMS):
                own.all_reduce_add(x, residual)

        rows.append(Row(f"{what}: kernel", median_us(by_kernel) / NUM_SUMS, "us"))
        if nccl is None:
            continue

        def by_nccl(sums: NcclSums = nccl, x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            for _ in range(NUM_SUMS):
                sums.add(x)
                residual.add_(x)

        rows.append(Row("  NCCL and an addition", _launched_us(by_nccl) / NUM_SUMS, "us"))
    group.gathered(None)
    own.close()
    return rows


def _launched_us(run: Callable[[], None]) -> float:
    """Returns the median microseconds without a graph."""
    run()
    times = []
    for _ in range(NUM_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[NUM_RUNS // 2]


def follow(seat: Seat) -> None:
    measure(seat.group, seat.group.of_leader(0))
    while not seat.memory.progress.is_stopping:
        seat.lanes.wait(0.1)


def on_ranks(degree: int, hidden_size: int) -> list[Row]:
    worker = WorkerConfig("decode-0", "decode", EngineConfig(model_dir="none", degree=degree), 1)

    def report_death(text: str) -> None:
        print(text, file=sys.stderr)

    ranks = RankProcesses(worker, cast(WorkerRole, None), "", follow, report_death)
    try:
        return measure(ranks.group, ranks.group.of_leader(hidden_size))
    finally:
        ranks.stop(STOP_TIMEOUT_S)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="at most 8 (%(default)s)")
    parser.add_argument("--hidden-size", type=int, default=4096, help="numbers of a row (%(default)s)")
    arguments = parser.parse_args(argv)
    rows = on_ranks(arguments.ranks, arguments.hidden_size)
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return report(rows, f"Sums over {arguments.ranks} ranks on {gpus}", arguments.json)


if __name__ == "__main__":
    # Followers import `follow` by the name of its module.
    from benchmarks import all_reduce

    sys.exit(all_reduce.main())
