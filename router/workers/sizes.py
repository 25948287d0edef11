"""The numbers of a cluster's processes, as the supervisor tells them to the routers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.config import Role


@dataclass(frozen=True, slots=True)
class KindSize:
    """Processes of one kind whose number follows the load.

    Attributes:
        target: number that the planner wants now.
        ready, starting, leaving: processes that take requests, that load, and that drain.
        start_s: time of a start, measured or guessed.
        reason: reason of the last change; "": there was none.
        no_room: why no process can be added now, though the planner wants more; "": one can.
    """

    low: int
    high: int
    target: int
    ready: int
    starting: int
    leaving: int
    start_s: float
    reason: str = ""
    no_room: str = ""


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """
    Attributes:
        kinds: by kind: `any`, `prefill`, `decode`, `both` or `router`.
        num_changes: begun changes by kind, direction (`up`, `down`) and reason.
        routers: names of the routers that are to run; (): all.
        failure: why a kind without any worker cannot be started now; "": starts work.
        is_assumed: the supervisor has said nothing yet.
    """

    kinds: Mapping[str, KindSize] = field(default_factory=dict)
    num_changes: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    routers: tuple[str, ...] = ()
    failure: str = ""
    is_assumed: bool = False

    def starts_from_zero(self, role: Role) -> bool:
        """Returns whether requests may wait for the first worker of a role; True before the supervisor's first word."""
        served = (size for kind, size in self.kinds.items() if kind in (role, "both", "any"))
        return self.is_assumed or any(size.low == 0 < size.high for size in served)

    def rows(self) -> list[dict[str, Any]]:
        """Returns each kind with its numbers, in the fields of SizeStatus (inference.proto)."""
        return [{"kind": kind, **asdict(size)} for kind, size in self.kinds.items()]

    @property
    def refusal(self) -> str:
        """Why no worker can be started for waiting requests, or ""."""
        lacking = (kind.no_room for kind in self.kinds.values() if not kind.ready + kind.starting)
        return self.failure or next(filter(None, lacking), "")

    @property
    def start_s(self) -> float:
        """Longest start of a kind."""
        return max((kind.start_s for kind in self.kinds.values()), default=0.0)
