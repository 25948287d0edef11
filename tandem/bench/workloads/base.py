"""The interface of workloads: sessions of turns, made before a run."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.bench.records import Group

# Protects memory from a mistake in a trace.
MAX_TRACE_LENGTH = 20_000_000

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a prompt. Attributes: num_tokens: exact for token ids; for text, the number of words."""

    role: Role
    num_tokens: int
    token_ids: "array[int] | None" = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. Its prompt is the session so far and `parts`.

    Attributes:
        stand_in: replaces an answer without token ids in later prompts of token ids; None: last turn.
        think_s: seconds between the last answer's end and this turn.
    """

    parts: tuple[PromptPart, ...]
    num_output_tokens: int
    stand_in: PromptPart | None = None
    think_s: float = 0.0


@dataclass(slots=True)
class Session:
    """Sequential turns.

    Attributes:
        index: of the first turn among all requests; the others follow.
        due_s: seconds from the run's start to the first turn; None: as soon as there is room.
        begins_with: first turns of a repeating stream; None: `turns`.
    """

    index: int
    turns: tuple[Turn, ...]
    group: Group = "requests"
    due_s: float | None = None
    begins_with: Turn | None = None


class Workload(ABC):
    """Makes the sessions of a run, the same for the same seed."""

    @abstractmethod
    def sessions(self) -> list[Session]:
        """Return sessions by arrival. Raises ValueError, such as for an unreadable trace."""


def numbered(turns_of_sessions: Sequence[Sequence[Turn]]) -> list[Session]:
    sessions, index = [], 0
    for turns in turns_of_sessions:
        sessions.append(Session(index, tuple(turns)))
        index += len(turns)
    return sessions


def timed(turns: Sequence[tuple[float, Turn]], time_scale: float) -> list[Session]:
    """Turn a trace's (seconds, turn) pairs into sessions, the first at 0. Args: time_scale: factor of the times."""
    in_order = sorted(turns, key=lambda pair: pair[0])
    return [
        Session(index, (turn,), due_s=(at_s - in_order[0][0]) * time_scale)
        for index, (at_s, turn) in enumerate(in_order)
    ]


def trace_length(value: Any) -> int:
    """Raises ValueError, TypeError, OverflowError."""
    num_tokens = int(value)
    if not 0 <= num_tokens <= MAX_TRACE_LENGTH:
        raise ValueError(f"{value} is no number of tokens from 0 to {MAX_TRACE_LENGTH:,}")
    return max(1, num_tokens)
