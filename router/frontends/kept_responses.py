"""Responses that clients may continue or fetch again, in this router's memory."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_RESPONSES = 16384
MAX_BYTES = 128 * 2**20
MAX_AGE_S = 24 * 3600.0
OVERHEAD_BYTES = 1024


@dataclass(eq=False, slots=True)
class KeptResponse:
    """A response and its conversation; or a conversation, whose turns are the responses before it.

    Attributes:
        answer: JSON object; empty once it can no longer be found.
        previous: the response that it continues; kept as long as this one.
        num_holders: kept responses that continue this one, plus one while it can be found.
        num_turns: when it was made, itself included.
    """

    response_id: str
    key: str
    used_at: float
    answer: bytes
    input_items: bytes
    output_items: bytes
    previous: "KeptResponse | None"
    num_holders: int = 0
    num_turns: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_turns = 1 + (self.previous.num_turns if self.previous is not None else 0)

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.input_items) + len(self.output_items) + OVERHEAD_BYTES

    @property
    def num_conversation_bytes(self) -> int:
        return sum(map(len, self.item_parts()))

    def item_parts(self) -> list[bytes]:
        """Returns the conversation's items as JSON lists, oldest first."""
        return [part for turn in self.turns() for part in (turn.input_items, turn.output_items)]

    def turns(self) -> list["KeptResponse"]:
        found = []
        response: KeptResponse | None = self
        while response is not None:
            found.append(response)
            response = response.previous
        return found[::-1]


class KeptResponses:
    """One router's responses, limited in number, bytes and time since their last use. The largest key's least recently
    used response goes first. Belongs to the router's loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        self._clock = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        # By key, least recently used first.
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
        """Args: key: digest of the client's API key."""
        response = KeptResponse(response_id, key, self._clock(), answer, input_items, output_items, previous)
        self._drop_old()
        self._found.setdefault(key, OrderedDict())[response_id] = response
        self.num_responses += 1
        self._hold(response)
        self._keep_limits()

    def extend(self, conversation_id: str, key: str, *, input_items: bytes, output_items: bytes) -> bool:
        """Appends a turn to a conversation. Returns whether there is one."""
        conversation = self.find(conversation_id, key)
        if conversation is None:
            return False
        earlier = conversation.previous
        turn = KeptResponse(conversation_id, key, 0.0, b"", input_items, output_items, earlier)
        self._hold(turn)
        conversation.previous = turn
        self._release(earlier)
        self._keep_limits()
        return True

    def change(self, conversation_id: str, key: str, answer: bytes) -> bool:
        """Replaces a conversation's object. Returns whether there is one."""
        conversation = self.find(conversation_id, key)
        if conversation is None:
            return False
        self._count(conversation, -1)
        conversation.answer = answer
        self._count(conversation, 1)
        return True

    def find(self, response_id: str, key: str) -> KeptResponse | None:
        self._drop_old()
        responses = self._found.get(key)
        response = responses.get(response_id) if responses is not None else None
        if responses is not None and response is not None:
            response.used_at = self._clock()
            responses.move_to_end(response_id)
        return response

    def forget(self, response_id: str, key: str) -> bool:
        response = self.find(response_id, key)
        if response is not None:
            self._drop(response)
        return response is not None

    def _keep_limits(self) -> None:
        while self.num_responses > self._max_responses or self.num_bytes > self._max_bytes:
            largest = max(self._found, key=lambda key: self._num_bytes_of[key])
            self._drop(next(iter(self._found[largest].values())))

    def _drop_old(self) -> None:
        oldest = self._clock() - self._max_age_s
        for responses in list(self._found.values()):
            while responses and (first := next(iter(responses.values()))).used_at < oldest:
                self._drop(first)

    def _drop(self, response: KeptResponse) -> None:
        """Items that other responses continue stay in memory, without the answer."""
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
