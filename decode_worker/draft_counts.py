"""Counts of drafts by source."""

from tandem.messages import MAX_COUNTED_LENGTH, Drafted


class DraftCounts:
    """Drafts of one source since the start. A proposal is those of one request in one step."""

    def __init__(self) -> None:
        self._num_proposals = 0
        self.num_tokens = 0
        self._num_accepted = 0
        self._num_by_length = [0] * (MAX_COUNTED_LENGTH + 1)

    def drafted(self, num_tokens: int) -> None:
        self._num_proposals += 1
        self.num_tokens += num_tokens

    def checked(self, num_accepted: int) -> None:
        self._num_accepted += num_accepted
        self._num_by_length[min(num_accepted, MAX_COUNTED_LENGTH)] += 1

    def named(self, source: str) -> Drafted:
        return Drafted(source, self._num_proposals, self.num_tokens, self._num_accepted, tuple(self._num_by_length))
