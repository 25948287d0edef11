"""Access of clients: API keys, their limits, and their cache namespaces."""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tandem.config import parse_api_key
from tandem.router.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from tandem.router.workers.peer_counts import PeerCounts
from tandem.rpc.auth import TokenSet, bearer_token

NO_ADMIN = "adapters are loaded and unloaded only where the server was started with --admin-key"


class Access:
    """API keys and their limits. Without keys all clients share the key "".

    Attributes:
        num_keys: number of keys.
    """

    def __init__(
        self,
        api_keys: Sequence[str],
        max_requests_per_key: int,
        elsewhere: PeerCounts | None = None,
        max_priority: int = 2**31 - 1,
        max_bytes: int = 2**63,
        admin_keys: Sequence[str] = (),
    ) -> None:
        """
        Args:
            api_keys: "KEY" or "KEY MAX_PRIORITY" each.
            max_requests_per_key: 0: unlimited.
            max_bytes: limit for all requests in hand; with several keys, each key may use half.
            admin_keys: keys of administrators, who are no clients.
        """
        self._admin_keys = TokenSet(admin_keys)
        self._elsewhere = elsewhere
        self._max_priority = max_priority
        self._max_requests_per_key = max_requests_per_key
        self._num_requests: Counter[str] = Counter()
        self._max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()
        self._num_bytes_of_all = 0
        self.set_keys(api_keys)

    def set_keys(self, api_keys: Sequence[str]) -> None:
        """Replaces the keys. Requests in hand go on, also those of keys that are gone."""
        keys = [parse_api_key(text) for text in api_keys]
        self.num_keys = len(keys)
        self._keys = TokenSet([key.key for key in keys])
        self._max_priorities = {key.key: key.max_priority for key in keys if key.max_priority is not None}
        self._max_bytes_per_key = self._max_bytes // 2 if len(keys) > 1 else self._max_bytes

    def identify(self, authorization: str | None) -> str:
        """Returns the key of "Bearer KEY". Raises UnauthenticatedError."""
        if not self._keys:
            return ""
        key = bearer_token(authorization)
        if not key:
            raise UnauthenticatedError("an API key is needed: send it as 'Authorization: Bearer KEY'")
        if key not in self._keys:
            raise UnauthenticatedError("the API key is wrong")
        return key

    @property
    def has_admin(self) -> bool:
        """Whether there are admin keys."""
        return bool(self._admin_keys)

    def is_admin(self, authorization: str | None) -> bool:
        return bearer_token(authorization) in self._admin_keys

    def check_admin(self, authorization: str | None) -> None:
        """Raises UnauthenticatedError: the header names no admin key."""
        if not self.is_admin(authorization):
            raise UnauthenticatedError("an admin key is needed: send it as 'Authorization: Bearer KEY'")

    def has_key(self, authorization: str | None) -> bool:
        """Whether the header names one of the keys; never without keys."""
        return bearer_token(authorization) in self._keys

    def num_requests_by_key(self) -> dict[str, int]:
        """Returns counts by key digest; empty without a limit."""
        if not self._max_requests_per_key:
            return {}
        return {key_digest(key): count for key, count in self._num_requests.items()}

    def check_priority(self, key: str, priority: int) -> None:
        limit = self._max_priorities.get(key, self._max_priority)
        if priority > limit:
            raise InvalidRequestError(f"priority must be at most {limit} for this client, not {priority}", "priority")

    @contextmanager
    def hold(self, key: str, num_requests: int = 1) -> Iterator[None]:
        """Raises OverloadedError above the key's limit."""
        if self._max_requests_per_key:
            num_in_hand = self._num_requests[key]
            if self._elsewhere is not None:
                num_in_hand += self._elsewhere.num_requests_of(key_digest(key))
            # Other routers' counts lag, so each router allows a key one request in any case.
            has_none_here = not self._num_requests[key] and num_requests == 1
            if num_in_hand + num_requests > self._max_requests_per_key and not has_none_here:
                raise OverloadedError(
                    f"{num_in_hand} requests of this key are in hand already; try again when one has ended"
                )
        self._num_requests[key] += num_requests
        try:
            yield
        finally:
            self._num_requests[key] -= num_requests
            if not self._num_requests[key]:
                del self._num_requests[key]

    @contextmanager
    def hold_bytes(self, key: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts bytes until the context ends. It raises OverloadedError above a limit."""
        num_held = 0

        def hold(num_bytes: int) -> None:
            nonlocal num_held
            if self._num_bytes_of_all + num_bytes > self._max_bytes:
                raise OverloadedError("the requests in hand fill the memory set aside for them; try again later")
            if self._num_bytes[key] + num_bytes > self._max_bytes_per_key:
                raise OverloadedError(
                    f"{self._num_bytes[key]} bytes of requests of this key are in hand already; try again when one has "
                    "ended"
                )
            self._num_bytes[key] += num_bytes
            self._num_bytes_of_all += num_bytes
            num_held += num_bytes

        try:
            yield hold
        finally:
            self._num_bytes_of_all -= num_held
            self._num_bytes[key] -= num_held
            if not self._num_bytes[key]:
                del self._num_bytes[key]


class CacheNamespaces:
    """A cache namespace for each API key. In a shared cache, prefill times would reveal other clients' prompts.

    Workers see only a digest. It depends on a secret, so a guessed key cannot be confirmed by its namespace.
    """

    def __init__(self, secret: str, share_between_keys: bool) -> None:
        """Args: secret: at most 64 bytes. Pages are found again as long as it stays the same."""
        self._secret = secret
        self._share_between_keys = share_between_keys

    def of(self, key: str, asked_for: str) -> str:
        if not key or self._share_between_keys:
            return asked_for
        return f"{self.owner(key)}/{asked_for}"

    def owner(self, key: str) -> str:
        """Returns tandem.prefix.owner_of a key's namespaces, where keys do not share them."""
        return secret_digest(self._secret, key)


def secret_digest(secret: str, client: str) -> str:
    """Returns a name of a client that only holders of the secret can compute."""
    return hashlib.blake2b(client.encode(), key=secret.encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=1024)
def key_digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
