"""Orders of actors: delivery and secrecy."""

import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.on_ray.codec import encode
from tandem.deploy.on_ray.sealed import KeyPair, seal
from tandem.deploy.on_ray.sealed_actor import SealedActor, sealed_order


@dataclass(frozen=True)
class Order:
    api_keys: tuple[str, ...] = ()


ORDER = Order(("a-secret",))


class Worker(SealedActor[Order]):
    order_type = Order

    def start(self, timeout_s: float = 5.0) -> Order:
        return self._wait_order(timeout_s)


def test_it_waits_for_its_order() -> None:
    worker = Worker(None)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(worker.start()))
    thread.start()
    assert worker.share_cluster_key(KeyPair().public_key) == b"", "it has none yet"
    sealed = sealed_order(ORDER, worker.public_key(), b"k" * 32)
    assert b"a-secret" in encode(ORDER) and b"a-secret" not in sealed and b"k" * 8 not in sealed
    worker.tell(sealed)
    thread.join(5.0)
    assert got == [ORDER]
    # Only the asking supervisor can read the answer.
    asking = KeyPair()
    assert asking.open(worker.share_cluster_key(asking.public_key)) == b"k" * 32


def test_the_first_order_counts() -> None:
    worker = Worker(None)
    for order in (ORDER, Order()):
        worker.tell(sealed_order(order, worker.public_key()))
    assert worker.start() == ORDER


def test_a_refused_order_is_reported_to_the_waiting_actor() -> None:
    worker = Worker(None)
    with pytest.raises(ValueError, match="not a Order of this version"):
        worker.tell(sealed_order({"unknown": 1}, worker.public_key()))
    with pytest.raises(ValueError, match="not a Order of this version"):
        worker.start()
    worker.tell(sealed_order(ORDER, worker.public_key()))
    assert worker.start() == ORDER


def test_an_order_for_another_life_is_refused() -> None:
    worker = Worker(None)
    with pytest.raises(ValueError, match="for another key"):
        worker.tell(sealed_order(ORDER, Worker(None).public_key()))
    with pytest.raises(TimeoutError, match="got no order within"):
        worker.start(0.01)


class Exploit:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    """Anyone with the public key can seal."""
    worker, path = Worker(None), tmp_path / "made"
    pickle.loads(pickle.dumps(Exploit(path)))
    assert path.exists()
    path.unlink()
    for message in (pickle.dumps(Exploit(path)), pickle.dumps((Exploit(path), b""))):
        with pytest.raises(ValueError, match=r"not a _SealedOrder .*Invalid JSON"):
            worker.tell(seal(message, worker.public_key()))
    assert not path.exists()
    with pytest.raises(ValueError, match=r"not a Order .*keys: Unexpected"):
        worker.tell(sealed_order(Other(), worker.public_key()))
    worker.tell(sealed_order(ORDER, worker.public_key()))
    assert worker.start() == ORDER


@dataclass(frozen=True)
class Other:
    keys: int = 0


def test_an_order_at_creation_needs_no_wait() -> None:
    assert Worker(ORDER).start(0.0) == ORDER
