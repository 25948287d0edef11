"""Main function of a follower: builds its part of the engine and follows the leader."""

import logging
import os
import sys

import torch

from tandem.engine.build import build_engine
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
    use_device(config.engine.device, order.ranks)
    engine = build_engine(
        config.engine, order.incarnation, lambda doing: logger.info("%s", doing.partition(" (")[0]), seat.group
    )
    credentials = ClusterCredentials(config.cluster_token, config.cluster_tls)

    def build_lanes() -> LaneDriver | None:
        use_device(config.engine.device, order.ranks)
        return order.role.build_lanes(engine, config, credentials)

    lanes = LaneThread(build_lanes, seat.lanes, lambda: seat.memory.progress.beat_lanes(order.ranks))
    # Before the leader serves: until then the lanes stand still.
    lanes.wait_built()
    # All ranks wait for the slowest: no pauses that the leader does not have.
    freeze_objects()
    collect_seldom()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sleep_exactly()
    seat.group.gathered(LinkRank(os.getpid(), engine.pool.gpu, engine.pool.layout.heads))
    FollowerLoop(engine, seat.memory.ring, seat.memory.progress).run()


def use_device(device: str, ranks: RankConfig) -> None:
    """Makes the rank's GPU the calling thread's. Ranks share the visible GPUs evenly."""
    if device == "cuda":
        torch.cuda.set_device(ranks.rank * torch.cuda.device_count() // ranks.degree)
