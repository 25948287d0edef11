"""An actor that learns what it is to do once it is there: Ray carries what it is created with to its host in the clear,
and keeps it."""

import pickle
import threading
from typing import Any, Generic, TypeVar

from tandem.deploy.on_ray.sealed import KeyPair, seal

# A cluster's supervisor tells as soon as the process is there.
ORDER_TIMEOUT_S = 60.0

T = TypeVar("T")


class SealedActor(Generic[T]):
    """Its subclasses ask for their orders by `_wait_order`."""

    def __init__(self, order: T | None) -> None:
        """Args: order: what it is to do; None: it is told that by `tell`, sealed."""
        self._order = order
        self._cluster_key = b""
        self._is_told = threading.Event()
        self._keys: KeyPair | None = None
        if order is None:
            self._keys = KeyPair()
        else:
            self._is_told.set()

    def public_key(self) -> bytes:
        """What its orders are to be sealed to; another life of it has another one."""
        assert self._keys is not None
        return self._keys.public_key

    def tell(self, sealed: bytes) -> None:
        """Args: sealed: what `sealed_order` made. Only the first counts. Raises ValueError: it cannot be opened."""
        assert self._keys is not None
        words = self._keys.open(sealed)
        if not self._is_told.is_set():
            self._order, self._cluster_key = pickle.loads(words)
            self._is_told.set()

    def share_cluster_key(self, public_key: bytes) -> bytes:
        """The cluster's key, sealed to this one; b"": it has none yet."""
        return seal(self._cluster_key, public_key) if self._cluster_key else b""

    def _wait_order(self, timeout_s: float = ORDER_TIMEOUT_S) -> T:
        """Raises TimeoutError: nobody has told it."""
        if not self._is_told.wait(timeout_s):
            raise TimeoutError(f"was not told what to do within {timeout_s:.0f} s")
        assert self._order is not None
        return self._order


def sealed_order(order: Any, public_key: bytes, cluster_key: bytes = b"") -> bytes:
    """An order for the actor with this key.

    Args:
        cluster_key: what opens the supervisor's notes, which another life of that asks for; b"": it is not to have it.
    """
    return seal(pickle.dumps((order, cluster_key)), public_key)
