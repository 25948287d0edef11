"""Lives of followers for tests of their processes."""

import os
import time

from tandem.head_slice import HeadSlice
from tandem.messages import LinkRank
from tandem.worker.ranks.seat import Seat

POLL_S = 0.002


class NoRole:
    """Stands for a role, of which these lives need nothing."""


def agree_and_echo(seat: Seat) -> None:
    """Gathers ranks, then returns the leader's messages until the stop."""
    ranks = seat.order.ranks
    seat.group.gathered(("rank", ranks.rank, os.getpid()))
    progress = seat.memory.progress
    while not progress.is_stopping:
        progress.beat(ranks)
        progress.beat_lanes(ranks)
        for message in seat.lanes.receive():
            seat.lanes.send(bytes([ranks.rank]) + message)
        time.sleep(POLL_S)


def refuse(seat: Seat) -> None:
    """Rank 1 refuses after a first agreement; the others wait for it."""
    seat.group.gathered(None)
    if seat.order.ranks.rank == 1:
        raise ValueError("the model has 3 heads")
    seat.group.gathered(None)


def never_end(seat: Seat) -> None:
    seat.group.gathered(None)
    while True:
        time.sleep(60)


def build_and_wait(seat: Seat) -> None:
    _build(seat)
    progress = seat.memory.progress
    while not progress.is_stopping:
        progress.beat(seat.order.ranks)
        progress.beat_lanes(seat.order.ranks)
        time.sleep(POLL_S)


def build_and_die(seat: Seat) -> None:
    _build(seat)
    if seat.order.ranks.rank == 2:
        os._exit(3)
    while not seat.memory.progress.is_stopping:
        time.sleep(POLL_S)


def refuse_at_once(seat: Seat) -> None:
    """Rank 2 refuses; the others lose it."""
    if seat.order.ranks.rank == 2:
        raise ValueError("too little memory")
    _build(seat)


def _build(seat: Seat) -> None:
    seat.group.check_equal("the number of pages", 8)
    seat.group.gathered(LinkRank(os.getpid(), "", HeadSlice.of(1, 0, 1)))
