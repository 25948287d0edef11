"""An actor that gets its order later, sealed: Ray stores constructor arguments and sends them in the clear."""

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.deploy.on_ray.codec import decode, encode
from tandem.deploy.on_ray.sealed import KeyPair, seal

ORDER_TIMEOUT_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _SealedOrder:
    order: bytes
    cluster_key: bytes


class SealedActor(Generic[T]):
    """An actor with an order, which subclasses get from `_wait_order`. Attributes: order_type: class of the order."""

    order_type: type[T]

    def __init__(self, order: T | None) -> None:
        """Args: order: None: `tell` brings it, sealed."""
        self._order = order
        self._refusal: ValueError | None = None
        self._cluster_key = b""
        self._is_told = threading.Event()
        self._keys: KeyPair | None = None
        if order is None:
            self._keys = KeyPair()
        else:
            self._is_told.set()

    def public_key(self) -> bytes:
        """Returns the key to seal its order to, new in each life."""
        assert self._keys is not None
        return self._keys.public_key

    def tell(self, sealed: bytes) -> None:
        """Takes a `sealed_order`; only the first valid one counts.

        Raises:
            ValueError: the message cannot be opened, or is not an order for this actor.
        """
        assert self._keys is not None
        told = decode(_SealedOrder, self._keys.open(sealed))
        try:
            order = decode(self.order_type, told.order)
        except ValueError as error:
            # The teller does not wait for an answer, so `_wait_order` reports it.
            self._refusal = error
            self._is_told.set()
            raise
        if self._order is None:
            self._order, self._cluster_key = order, told.cluster_key
            self._is_told.set()

    def share_cluster_key(self, public_key: bytes) -> bytes:
        """Returns the cluster's key, sealed to `public_key`; b"" before `tell`."""
        return seal(self._cluster_key, public_key) if self._cluster_key else b""

    def _wait_order(self, timeout_s: float = ORDER_TIMEOUT_S) -> T:
        """
        Raises:
            TimeoutError: no order came.
            ValueError: the order is not for this actor, or its configuration does not fit this host.
        """
        if not self._is_told.wait(timeout_s):
            raise TimeoutError(f"got no order within {timeout_s:.0f} s")
        if self._order is not None:
            return self._order
        assert self._refusal is not None
        raise self._refusal


def sealed_order(order: object, public_key: bytes, cluster_key: bytes = b"") -> bytes:
    """Encodes and seals an order for the actor with this public key.

    Args:
        cluster_key: opens the supervisor's notes; the supervisor's next life asks the actors for it. b"": none.
    """
    return seal(encode(_SealedOrder(encode(order), cluster_key)), public_key)
