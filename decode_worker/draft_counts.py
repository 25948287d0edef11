"""Counts of drafts by source."""

from tandem.messages import MAX_COUNTED_LENGTH, Drafted


class DraftCounts:
    """Drafts of one source since the start. A draft is one request's in one step."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_tokens = 0
        self._num_accepted = 0
        self._num_by_length = [0] * (MAX_COUNTED_LENGTH + 1)

    def drafted(self, num_tokens: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_tokens

    def checked(self, num_accepted: int) -> None:
        self._num_accepted += num_accepted
        self._num_by_length[min(num_accepted, MAX_COUNTED_LENGTH)] += 1

    def named(self, source: str) -> Drafted:
        return Drafted(source, self.num_drafts, self.num_tokens, self._num_accepted, tuple(self._num_by_length))
