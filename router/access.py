"""Who may send requests, and how many at once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from router.errors import OverloadedError, UnauthenticatedError
from tandem.rpc.auth import TokenSet, bearer_token


class Access:
    """API keys and the limit on requests in hand for each. Without keys everybody is let in as one and the same."""

    def __init__(self, api_keys: Sequence[str], max_requests_per_key: int) -> None:
        """Args: max_requests_per_key: 0: any number."""
        self._keys = TokenSet(api_keys)
        self._max_requests_per_key = max_requests_per_key
        self._num_requests: Counter[str] = Counter()

    def identify(self, authorization: str | None) -> str:
        """Whose request this is.

        Args:
            authorization: the header of that name, "Bearer KEY".

        Raises:
            UnauthenticatedError: the key is missing or wrong.
        """
        if not self._keys:
            return ""
        key = bearer_token(authorization)
        if not key:
            raise UnauthenticatedError("an API key is needed: send it as 'Authorization: Bearer KEY'")
        if key not in self._keys:
            raise UnauthenticatedError("the API key is wrong")
        return key

    @contextmanager
    def hold(self, key: str, num_requests: int = 1) -> Iterator[None]:
        """Counts requests as in hand for as long as the context lasts.

        Raises:
            OverloadedError: this key would have more than it may.
        """
        if self._max_requests_per_key and self._num_requests[key] + num_requests > self._max_requests_per_key:
            raise OverloadedError(
                f"{self._num_requests[key]} requests of this key are in hand already; try again when one has ended"
            )
        self._num_requests[key] += num_requests
        try:
            yield
        finally:
            self._num_requests[key] -= num_requests
            if not self._num_requests[key]:
                del self._num_requests[key]
