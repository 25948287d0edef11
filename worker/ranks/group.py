"""Agreement between ranks that are processes, over sockets to the leader."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.group import RankGroup
from tandem.engine.ranks.progress import Progress

T = TypeVar("T")

# The slowest rank may load weights from a cold disk meanwhile.
START_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Last message of a follower that cannot start. Attributes: is_refusal: the configuration is at fault."""

    text: str
    is_refusal: bool


class LeaderGroup(RankGroup):
    """The leader collects the values of all ranks and returns them to all."""

    def __init__(
        self,
        followers: Sequence[Connection],
        progress: Progress,
        wait_timeout_s: float,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Args: followers: connections by rank, from rank 1."""
        self.ranks = RankConfig(0, 1 + len(followers))
        self.progress = progress
        self.wait_timeout_s = wait_timeout_s
        self._followers = followers
        self._timeout_s = timeout_s

    def gathered(self, value: T) -> list[T]:
        """
        Raises:
            ValueError: a follower cannot serve the configuration.
            RuntimeError: a follower failed.
        """
        deadline = time.monotonic() + self._timeout_s
        values = [value]
        for rank, follower in enumerate(self._followers, 1):
            answer = _received(follower, deadline, rank)
            if isinstance(answer, StartFailure):
                raise failure_of(rank, answer)
            values.append(answer)
        for rank, follower in enumerate(self._followers, 1):
            try:
                follower.send(values)
            except OSError as error:
                raise ConnectionError(f"rank {rank} has ended") from error
        return values

    def find_failure(self, timeout_s: float) -> Exception | None:
        """Returns the failure that a follower sent, whatever else it sent before; None if none comes in time."""
        deadline = time.monotonic() + timeout_s
        for rank, follower in enumerate(self._followers, 1):
            try:
                while True:
                    if isinstance(answer := _received(follower, deadline, rank), StartFailure):
                        return failure_of(rank, answer)
            except (ConnectionError, TimeoutError):
                continue
        return None


class FollowerGroup(RankGroup):
    def __init__(
        self,
        ranks: RankConfig,
        leader: Connection,
        progress: Progress,
        wait_timeout_s: float,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.ranks = ranks
        self.progress = progress
        self.wait_timeout_s = wait_timeout_s
        self._leader = leader
        self._timeout_s = timeout_s

    def gathered(self, value: T) -> list[T]:
        try:
            self._leader.send(value)
        except OSError as error:
            raise ConnectionError("the leader has ended") from error
        values: list[T] = _received(self._leader, time.monotonic() + self._timeout_s, 0)
        return values


def failure_of(rank: int, failure: StartFailure) -> Exception:
    text = f"rank {rank}: {failure.text}"
    return ValueError(text) if failure.is_refusal else RuntimeError(text)


def _received(connection: Connection, deadline: float, rank: int) -> Any:
    try:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} has not answered in time")
        return connection.recv()
    except (EOFError, ConnectionResetError, BrokenPipeError) as error:
        raise ConnectionError(f"rank {rank} has ended") from error
