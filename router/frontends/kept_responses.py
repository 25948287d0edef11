"""Responses that clients may go on with or ask for again, in this router's memory."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_RESPONSES = 16384
MAX_BYTES = 128 * 2**20
MAX_AGE_S = 24 * 3600.0
# Of each beside what is counted of it.
OVERHEAD_BYTES = 1024


@dataclass(eq=False, slots=True)
class KeptResponse:
    """A response, and what its conversation was before.

    Attributes:
        used_at: when it was kept, or last found.
        answer: the response's object, as JSON; empty once it can no longer be found.
        input_items: what it was asked with, as a JSON list.
        output_items: likewise.
        previous: what it went on with; it is kept as long as this is.
        num_holders: those kept that go on with this, and one more while it can be found; 0: it is not counted.
    """

    response_id: str
    key: str
    used_at: float
    answer: bytes
    input_items: bytes
    output_items: bytes
    previous: "KeptResponse | None"
    num_holders: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.input_items) + len(self.output_items) + OVERHEAD_BYTES

    def turns(self) -> list["KeptResponse"]:
        """From the beginning of the conversation to this one."""
        found = []
        response: KeptResponse | None = self
        while response is not None:
            found.append(response)
            response = response.previous
        return found[::-1]


class KeptResponses:
    """Those of one router, within bounds on their number, bytes and age. If they are too many, those go first that were
    not used for longest of the key that has most. Belongs to the router's loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        """Args: max_age_s: since a response was last used."""
        self._clock = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        # Of each key, what was used last at the end.
        self._found: dict[str, OrderedDict[str, KeptResponse]] = {}
        self._num_bytes_of: dict[str, int] = {}
        self.num_responses = 0
        self.num_bytes = 0

    def keep(
        self,
        response_id: str,
        key: str,
        *,
        answer: bytes,
        input_items: bytes,
        output_items: bytes,
        previous: KeptResponse | None,
    ) -> None:
        """Args: key: what names the client among keys."""
        response = KeptResponse(response_id, key, self._clock(), answer, input_items, output_items, previous)
        self._drop_old()
        self._found.setdefault(key, OrderedDict())[response_id] = response
        self.num_responses += 1
        self._hold(response)
        while self.num_responses > self._max_responses or self.num_bytes > self._max_bytes:
            largest = max(self._found, key=lambda key: self._num_bytes_of[key])
            self._drop(next(iter(self._found[largest].values())))

    def find(self, response_id: str, key: str) -> KeptResponse | None:
        """A response that this key has. To go on with it or to look at it is to use it."""
        self._drop_old()
        responses = self._found.get(key)
        response = responses.get(response_id) if responses is not None else None
        if responses is not None and response is not None:
            response.used_at = self._clock()
            responses.move_to_end(response_id)
        return response

    def forget(self, response_id: str, key: str) -> bool:
        """Returns whether there was one."""
        response = self.find(response_id, key)
        if response is not None:
            self._drop(response)
        return response is not None

    def _drop_old(self) -> None:
        oldest = self._clock() - self._max_age_s
        for responses in list(self._found.values()):
            while responses and (first := next(iter(responses.values()))).used_at < oldest:
                self._drop(first)

    def _drop(self, response: KeptResponse) -> None:
        """It can no longer be found. What others go on with stays in memory, but for its own object."""
        responses = self._found[response.key]
        del responses[response.response_id]
        if not responses:
            del self._found[response.key]
        self.num_responses -= 1
        self._count(response, -1)
        response.answer = b""
        self._count(response, 1)
        self._release(response)

    def _hold(self, response: KeptResponse | None) -> None:
        while response is not None:
            response.num_holders += 1
            if response.num_holders > 1:
                return
            self._count(response, 1)
            response = response.previous

    def _release(self, response: KeptResponse | None) -> None:
        while response is not None:
            response.num_holders -= 1
            if response.num_holders:
                return
            self._count(response, -1)
            response = response.previous

    def _count(self, response: KeptResponse, sign: int) -> None:
        num_bytes = sign * response.num_bytes
        self.num_bytes += num_bytes
        num_bytes_of_key = self._num_bytes_of.get(response.key, 0) + num_bytes
        if num_bytes_of_key:
            self._num_bytes_of[response.key] = num_bytes_of_key
        else:
            del self._num_bytes_of[response.key]
