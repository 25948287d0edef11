"""The cluster's own planner as a sizer."""

from collections.abc import Callable, Mapping

from benchmarks.elastic.outcome import Limits
from benchmarks.elastic.sizers import Report, Sizer
from tandem.deploy.supervise.size_planner import Bounds, SizePlanner, SizeReport
from tandem.router.workers.objectives import Objectives


class Planned(Sizer):
    def __init__(self, bounds: Mapping[str, Bounds], limits: Limits, clock: Callable[[], float]) -> None:
        self._planner = SizePlanner(bounds, Objectives(limits.ttft_s, limits.itl_s), clock)

    def targets(self, report: Report) -> Mapping[str, int]:
        routers = {"router": len(report.demands)}
        start_s = dict.fromkeys(report.ready, report.start_s)
        size = SizeReport(
            report.demands, {**report.ready, **routers}, dict(report.starting), dict(report.leaving), start_s
        )
        return self._planner.plan(size)
