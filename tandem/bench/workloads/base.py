"""What a run sends: sessions of turns, made before it begins."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.bench.records import Group

# No model's context is larger; a mistake in a trace would have all memory filled with one prompt.
MAX_TRACE_LENGTH = 20_000_000

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a prompt, as token ids or as text.

    Attributes:
        num_tokens: exact for token ids; for text, the number of words, each of which is about a token.
        token_ids: None: it is text.
    """

    role: Role
    num_tokens: int
    token_ids: "array[int] | None" = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, whose prompt is all that was said in the session before and `parts`.

    Attributes:
        stand_in: what stands for the answer in the prompts of later turns where the prompts are token ids and the
            server tells none of its answer; None: the session ends with this turn.
        think_s: how long after the end of the last turn's answer it leaves, in seconds.
    """

    parts: tuple[PromptPart, ...]
    num_output_tokens: int
    stand_in: PromptPart | None = None
    think_s: float = 0.0


@dataclass(slots=True)
class Session:
    """Turns of which each leaves after the answer to the last.

    Attributes:
        index: of its first turn among all requests; its turns are numbered on from there.
        due_s: when the first turn leaves, in seconds from the run's start; None: as soon as there is room.
        begins_with: what a stream that is served again and again sends the first time; None: its turns.
    """

    index: int
    turns: tuple[Turn, ...]
    group: Group = "requests"
    due_s: float | None = None
    begins_with: Turn | None = None


class Workload(ABC):
    """Makes the sessions of a run. The same seed makes the same."""

    @abstractmethod
    def sessions(self) -> list[Session]:
        """In the order in which they arrive.

        Raises:
            ValueError: they cannot be made, as of a trace that cannot be read.
        """


def numbered(turns_of_sessions: Sequence[Sequence[Turn]]) -> list[Session]:
    """Sessions without arrival times."""
    sessions, index = [], 0
    for turns in turns_of_sessions:
        sessions.append(Session(index, tuple(turns)))
        index += len(turns)
    return sessions


def timed(turns: Sequence[tuple[float, Turn]], time_scale: float) -> list[Session]:
    """Sessions of a trace, the first at 0 and the others in order, however the trace has them.

    Args:
        turns: each with its moment, in seconds from any.
        time_scale: what times are multiplied with.
    """
    in_order = sorted(turns, key=lambda pair: pair[0])
    return [
        Session(index, (turn,), due_s=(at_s - in_order[0][0]) * time_scale)
        for index, (at_s, turn) in enumerate(in_order)
    ]


def trace_length(value: Any) -> int:
    """A trace's number of tokens, at least 1: nothing else can be sent. Raises ValueError, TypeError, OverflowError."""
    num_tokens = int(value)
    if not 0 <= num_tokens <= MAX_TRACE_LENGTH:
        raise ValueError(f"{value} is no number of tokens from 0 to {MAX_TRACE_LENGTH:,}")
    return max(1, num_tokens)
