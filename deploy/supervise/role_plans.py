"""Exchanges the workers' leans and the cluster's size with all routers, for their demands."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from tandem.deploy.on_ray.ray_module import RayError, ray
from tandem.deploy.supervise.role_planner import RolePlanner
from tandem.router.workers.leans import RouterDemand
from tandem.router.workers.sizes import ClusterSize

PLAN_INTERVAL_S = 0.5
# Age limit of a router's report: a router restarted meanwhile has no requests.
FRESH_S = 2.0


class RolePlans:
    """Exchanges plan and demand with each router in one call, every PLAN_INTERVAL_S, without waiting.

    Each exchange is complete, so a restart on either side loses nothing.
    """

    def __init__(
        self,
        planner: RolePlanner | None,
        routers: Callable[[], Mapping[str, Any]],
        size: Callable[[], ClusterSize | None],
        clock: Callable[[], float],
    ) -> None:
        """Args: planner: None: workers do not lean. size: returns None while the numbers are as configured."""
        self._planner = planner
        self._routers = routers
        self._size = size
        self._clock = clock
        self._plan_at = clock()
        # A router that keeps an old size waits for workers that nobody starts.
        self._had_size_at = -math.inf
        self._asked: dict[str, Any] = {}
        self._said: dict[str, tuple[float, RouterDemand]] = {}

    @property
    def demands(self) -> dict[str, RouterDemand]:
        """Recent demands by router."""
        now = self._clock()
        return {name: demand for name, (at, demand) in self._said.items() if now - at < FRESH_S}

    def take_turn(self) -> None:
        now = self._clock()
        self._take_answers(now)
        if now < self._plan_at:
            return
        self._plan_at = now + PLAN_INTERVAL_S
        size = self._size()
        if size is not None:
            self._had_size_at = now
        elif self._planner is None and now - self._had_size_at >= FRESH_S:
            return
        leans = dict(self._planner.plan(self.demands)) if self._planner is not None else {}
        for name, actor in self._routers().items():
            if name not in self._asked:
                self._asked[name] = actor.exchange_leans.remote(leans, size)

    def _take_answers(self, now: float) -> None:
        refs = list(self._asked.values())
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        for name in [name for name, ref in self._asked.items() if ref in answered]:
            with contextlib.suppress(RayError, TimeoutError):
                demand = ray.get(self._asked.pop(name))
                if demand is not None:
                    self._said[name] = now, demand
