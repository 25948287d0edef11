"""Messages from one writer to several readers, over slots that are few."""

import random
import threading
import time

import pytest

from tandem.engine.ranks.ring import NUM_SLOTS, SLOT_BYTES, Ring, RingReader


def ring_of(num_followers: int, timeout_s: float = 10.0) -> Ring:
    return Ring(memoryview(bytearray(Ring.num_bytes(num_followers))), num_followers, timeout_s)


def test_messages_of_all_sizes_arrive_once_and_in_order_at_each_follower() -> None:
    ring = ring_of(2)
    draw = random.Random(0)
    sizes = [1, 100, SLOT_BYTES - 16, SLOT_BYTES - 15, SLOT_BYTES, 3 * SLOT_BYTES, (NUM_SLOTS + 5) * SLOT_BYTES]
    messages = [draw.randbytes(size) for size in (*sizes, *(draw.randrange(1, 3000) for _ in range(300)))]
    received: list[list[bytes]] = [[], []]

    def read(rank: int) -> None:
        reader = ring.reader(rank)
        deadline = time.monotonic() + 20
        while len(received[rank - 1]) < len(messages) and time.monotonic() < deadline:
            if (message := reader.take()) is None:
                time.sleep(50e-6)
            else:
                received[rank - 1].append(message)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for message in messages:
        ring.write(message)
    for thread in threads:
        thread.join(20)
    assert received == [messages, messages]


def test_no_slot_is_overwritten_before_the_slowest_follower_has_taken_it() -> None:
    ring = ring_of(2, timeout_s=0.02)
    fast, slow = ring.reader(1), ring.reader(2)
    for number in range(NUM_SLOTS):
        ring.write(b"%d" % number)
    assert [fast.take() for _ in range(NUM_SLOTS)] == [b"%d" % number for number in range(NUM_SLOTS)]
    with pytest.raises(TimeoutError, match=r"^rank 2 has taken no message for 0\.02 s$"):
        ring.write(b"lost")
    assert slow.take() == b"0"
    ring.write(b"next")
    assert [slow.take() for _ in range(NUM_SLOTS)][-1] == fast.take() == b"next"
    assert slow.take() is None


def test_a_message_is_taken_only_whole() -> None:
    ring = ring_of(1, timeout_s=0.01)
    reader: RingReader = ring.reader(1)
    with pytest.raises(TimeoutError):
        # Its last part has no room.
        ring.write(bytes(NUM_SLOTS * SLOT_BYTES))
    assert reader.take() is None
