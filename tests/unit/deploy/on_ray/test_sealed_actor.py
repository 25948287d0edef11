"""What an actor is told, and by whom it can be read."""

import pickle
import threading

import pytest

from tandem.deploy.on_ray.sealed import KeyPair
from tandem.deploy.on_ray.sealed_actor import SealedActor, sealed_order

ORDER: dict[str, tuple[str, ...]] = {"api_keys": ("a-secret",)}


class Worker(SealedActor[dict[str, tuple[str, ...]]]):
    def start(self, timeout_s: float = 5.0) -> dict[str, tuple[str, ...]]:
        return self._wait_order(timeout_s)


def test_it_waits_until_it_is_told() -> None:
    worker = Worker(None)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(worker.start()))
    thread.start()
    assert worker.share_cluster_key(KeyPair().public_key) == b"", "it has none yet"
    sealed = sealed_order(ORDER, worker.public_key(), b"k" * 32)
    assert b"a-secret" in pickle.dumps(ORDER) and b"a-secret" not in sealed and b"k" * 8 not in sealed
    worker.tell(sealed)
    thread.join(5.0)
    assert got == [ORDER]
    # Who supervises next may have the key, and only he who asks can read the answer.
    asking = KeyPair()
    assert asking.open(worker.share_cluster_key(asking.public_key)) == b"k" * 32


def test_what_it_was_told_first_counts() -> None:
    worker = Worker(None)
    for order in (ORDER, {}):
        worker.tell(sealed_order(order, worker.public_key()))
    assert worker.start() == ORDER


def test_words_for_another_life_of_it_are_refused() -> None:
    worker = Worker(None)
    with pytest.raises(ValueError, match="for another key"):
        worker.tell(sealed_order(ORDER, Worker(None).public_key()))
    with pytest.raises(TimeoutError, match="was not told what to do"):
        worker.start(0.01)


def test_one_that_is_created_with_its_order_waits_for_nobody() -> None:
    assert Worker(ORDER).start(0.0) == ORDER
