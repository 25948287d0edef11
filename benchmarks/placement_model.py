"""Which layout of four workers serves the most requests in time, in a model of the cluster.

Time is virtual: workers take for their forwards what an H200 takes with a model of 8 billion parameters, those that do
both with prompts and decode steps in one forward, and clients send at random. What chooses among workers is the
router's own code, and what prompts get beside decode steps is up to the workers' own budget. Goodput is the highest
rate at which nine in ten requests keep to ttft=500ms,itl_p95=OBJECTIVE,itl_max=500ms.

It is a model: hosts, launches and networks take no time in it, and devices always the same. `--compare` shows what it
says of layouts that have been measured, with the forwards of that time: slower steps, and prompts before them.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cluster_model.cluster import FIXED, UNPLANNED, WORKERS, Layout, ModelCluster
from benchmarks.cluster_model.device import H200_8B, H200_8B_UNMIXED, DeviceFactors
from benchmarks.cluster_model.goodput import GoodputModel, Served
from benchmarks.cluster_model.workloads import WORKLOADS, Stretch, Workload, conversations
from tandem.router.workers.objectives import Objectives

TTFT_S = 0.5
# A load that turns does so this often, from the one of these to the other.
TURN_S = 30.0
NUM_STRETCHES = 6
TURNED = (WORKLOADS[0], WORKLOADS[2])
# So long after a turn objectives may be missed.
SETTLING_S = 2.0
LAYOUTS = (*FIXED, UNPLANNED, WORKERS)
# What four H200s gave for 4,096/256 with a model of 8 billion parameters (`tandem bench`): layout, objective for gaps
# in ms, requests a second. Workers of role `both` had pieces of one size between decode steps then: H200_8B_UNMIXED.
MEASURED = (
    ("2P2D", 15, 15.5),
    ("2P2D", 25, 15.5),
    ("3P1D", 15, 14.7),
    ("3P1D", 25, 22.0),
    ("both x4, chunks of 512", 25, 17.0),
    ("both x4, chunks of 8192", 15, 14.0),
    ("both x4, chunks of 8192", 25, 15.0),
)


class Cells:
    """The same cells with each of some seeds: goodput is the mean."""

    def __init__(self, num_seeds: int, device: DeviceFactors = H200_8B) -> None:
        self._models = [GoodputModel(seed, device) for seed in range(num_seeds)]

    def goodput(self, layout: Layout, workload: Workload, itl_ms: float) -> float:
        objectives = Objectives(TTFT_S, itl_ms / 1e3)
        return statistics.fmean(model.goodput(layout, workload, objectives) for model in self._models)


def compare(cells: Cells) -> Table:
    """The model beside what was measured. Args: cells: with the device that it was measured with."""
    chunked = [Layout(f"both x4, chunks of {size}", ("both",) * 4, chunk_size=size) for size in (512, 8192)]
    layouts = {layout.name: layout for layout in (*FIXED, *chunked)}
    table = Table("4096/256", "ITL p95", "measured", "model", "model / measured", title="goodput, requests/s")
    for name, itl_ms, measured in MEASURED:
        modelled = cells.goodput(layouts[name], WORKLOADS[0], itl_ms)
        table.add_row(name, f"{itl_ms} ms", f"{measured:.1f}", f"{modelled:.1f}", f"{modelled / measured:.2f}")
    return table


def turns(itl_ms: float, rates: Sequence[float], layouts: Sequence[Layout]) -> Table:
    """A load that turns every TURN_S from long prompts to long outputs and back. Args: rates: of either."""
    objectives = Objectives(TTFT_S, itl_ms / 1e3)
    stretches = [Stretch(TURNED[i % 2], i * TURN_S, (i + 1) * TURN_S, rates[i % 2]) for i in range(NUM_STRETCHES)]
    moments = [stretch.begins_at for stretch in stretches[1:]]
    title = f"{rates[0]:g}/s of {TURNED[0].name} and {rates[1]:g}/s of {TURNED[1].name} in turns, ITL p95 {itl_ms:g} ms"
    soon, later = f"good, first {SETTLING_S:g} s", "good after that"
    table = Table("layout", "requests", soon, later, "worst stretch", "roles change after", title=title)
    for layout in layouts:
        cluster = ModelCluster(layout, objectives)
        good: dict[bool, list[bool]] = {True: [], False: []}
        stretch_good: dict[int, list[bool]] = {}
        for record in cluster.run(list(conversations(stretches, seed=0))):
            is_soon = any(0 <= record.due_s - moment < SETTLING_S for moment in moments)
            meets = Served.of(record).meets(objectives)
            good[is_soon].append(meets)
            if not is_soon:
                stretch_good.setdefault(int(record.due_s / TURN_S), []).append(meets)
        waits = [min((t - m for t in cluster.role_changes if m <= t < m + TURN_S), default=TURN_S) for m in moments]
        table.add_row(
            layout.name,
            str(len(cluster.records)),
            f"{statistics.fmean(good[True]):.3f}",
            f"{statistics.fmean(good[False]):.3f}",
            f"{min(map(statistics.fmean, stretch_good.values())):.3f}",
            f"{statistics.fmean(waits):.1f} s" if layout.plans_roles else "",
        )
    return table


def rows(
    cells: Cells, workloads: Sequence[Workload], itls_ms: Sequence[float], layouts: Sequence[Layout]
) -> Iterator[dict[str, object]]:
    """One for each workload and objective: the goodput of each layout by its name, and the last one's divided by the
    best of the others."""
    for workload in workloads:
        for itl_ms in itls_ms:
            found = {layout.name: cells.goodput(layout, workload, itl_ms) for layout in layouts}
            *others, last = found.values()
            best = max(others, default=0.0)
            yield {"workload": workload.name, "itl_ms": itl_ms, **found, "ratio": last / best if best else None}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument(
        "--workloads", nargs="+", choices=names, default=names, help="input/output tokens (%(default)s)"
    )
    parser.add_argument("--itl", nargs="+", type=float, default=[15, 25, 50], metavar="MS", help="(%(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=[layout.name for layout in LAYOUTS], help="some of these")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="show what was measured and what the model says of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--turns",
        nargs=2,
        type=float,
        metavar="RATE",
        help="a load that turns between 4096/256 and 512/1024 at these rates, with the first objective of --itl",
    )
    arguments = parser.parse_args(argv)
    if arguments.compare:
        Console().print(compare(Cells(arguments.seeds, H200_8B_UNMIXED)))
        return 0
    if arguments.turns:
        Console().print(turns(arguments.itl[0], arguments.turns, LAYOUTS))
        return 0
    cells = Cells(arguments.seeds)
    layouts = [one for one in LAYOUTS if arguments.layouts is None or one.name in arguments.layouts]
    workloads = [workload for workload in WORKLOADS if workload.name in arguments.workloads]
    table = Table("workload", "ITL p95", *(layout.name for layout in layouts), f"{layouts[-1].name} / best other")
    found = []
    for row in rows(cells, workloads, arguments.itl, layouts):
        found.append(row)
        cells_of_row = [f"{row[layout.name]:.1f}" for layout in layouts]
        cells_of_row.append("" if row["ratio"] is None else f"{row['ratio']:.2f}")
        print(row["workload"], f"{row['itl_ms']:g} ms", *cells_of_row, file=sys.stderr, flush=True)
        table.add_row(str(row["workload"]), f"{row['itl_ms']:g} ms", *cells_of_row)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
