"""Main function of a follower: builds its part of the engine and follows the leader."""

import logging
import os
import sys
from collections.abc import Callable

import torch

from tandem.engine.build import build_engine
from tandem.engine.engine import Engine
from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.follower import FollowerLoop
from tandem.garbage import collect_seldom, freeze_objects
from tandem.messages import LinkRank
from tandem.rpc.credentials import ClusterCredentials
from tandem.timer_slack import sleep_exactly
from tandem.worker.base import LaneDriver
from tandem.worker.engine_thread import SWITCH_INTERVAL_S
from tandem.worker.ranks.lane_thread import LaneThread
from tandem.worker.ranks.seat import Seat

logger = logging.getLogger(__name__)


def serve_follower(seat: Seat) -> None:
    """Returns when the leader stops the worker.

    Raises:
        ValueError: the model cannot be served as configured.
    """
    order, config = seat.order, seat.order.worker
    engine = build_part(seat, lambda doing: logger.info("%s", doing.partition(" (")[0]))
    credentials = ClusterCredentials(config.cluster_token, config.cluster_tls)

    def build_lanes() -> LaneDriver | None:
        use_device(config.engine.device, order.ranks)
        return order.role.build_lanes(engine, config, credentials)

    lanes = LaneThread(build_lanes, seat.lanes, lambda: seat.memory.progress.beat_lanes(order.ranks))
    # Before the leader serves: until then the lanes stand still.
    lanes.wait_built()
    # Not counted for the worker's progress: copies are waited for with limits of their own.
    if (store := order.store) is not None:

        def build_copies() -> LaneDriver:
            use_device(config.engine.device, order.ranks)
            return store.build_follower(engine, order.ranks)

        # CUDA graphs have been captured: registering memory meanwhile would disturb that.
        LaneThread(build_copies, seat.copies, lambda: None, "store copies")
    avoid_pauses()
    seat.group.gathered(LinkRank(os.getpid(), engine.pool.gpu, engine.pool.layout.heads))
    FollowerLoop(engine, seat.memory.ring, seat.memory.progress).run()


def build_part(seat: Seat, on_progress: Callable[[str], None]) -> Engine:
    """Builds the rank's part of the engine on its GPU. Raises ValueError as `build_engine`."""
    config = seat.order.worker.engine
    use_device(config.device, seat.order.ranks)
    return build_engine(config, seat.order.incarnation, on_progress, seat.group)


def avoid_pauses() -> None:
    """Keeps the calling thread from pausing where the leader does not: all ranks wait for the slowest."""
    freeze_objects()
    collect_seldom()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sleep_exactly()


def use_device(device: str, ranks: RankConfig) -> None:
    """Makes the rank's GPU the calling thread's. Ranks share the visible GPUs evenly."""
    if device == "cuda":
        torch.cuda.set_device(ranks.rank * torch.cuda.device_count() // ranks.degree)
