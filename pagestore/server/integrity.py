"""Recounts the owners of a store's slots."""

from collections import Counter
from collections.abc import Sequence

from tandem.pagestore.server.finds import Finds
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.running_find import RunningFind
from tandem.pagestore.server.sessions import Session
from tandem.pagestore.server.slots import READING, STATE_NAMES, UNLISTED, WRITING
from tandem.pagestore.server.write_behind import WriteBehind


def check_owners(
    memory: PageMemory, sessions: Sequence[Session], finds: Finds, write_behind: Sequence[WriteBehind]
) -> str:
    """Compares the state of every slot with its users; "" or the first violation. O(slots)."""
    running = [find for session in sessions for find in session.finds.values()]
    return _check_finds(memory, finds, running) or _check_slots(memory, sessions, finds, write_behind)


def _check_finds(memory: PageMemory, finds: Finds, running: Sequence[RunningFind]) -> str:
    for slot, read in finds.reads.items():
        state = memory.states[slot] & ~UNLISTED
        if state != READING:
            return f"slot {slot} is read into, but {STATE_NAMES[state]}"
        for find, index in read.waiting.items():
            if find.coming.get(index) != slot:
                return f"find {find.number} of {find.session} does not expect slot {slot}"
    if {find for find in running if find.is_waiting} != finds.waiting or not finds.queued <= finds.waiting:
        return f"{finds.num_waiting} finds wait, but others expect pages"
    for find in running:
        name = f"find {find.number} of {find.session}"
        ahead = {*find.coming, *find.arrived}
        if not find.next <= find.ahead <= find.end or set(range(find.next, find.ahead)) != ahead:
            return f"{name} has lost a page"
        if len(find.slots) not in (find.next, 0):
            return f"{name} pins {len(find.slots)} of {find.next} pages"
        if find.question is not None and not finds.is_asking(find):
            return f"{name} waits for no answer"
        if find.ahead < find.end and not ahead and find not in finds.queued:
            return f"{name} waits for nothing"
    return ""


def _check_slots(
    memory: PageMemory, sessions: Sequence[Session], finds: Finds, write_behind: Sequence[WriteBehind]
) -> str:
    writers = Counter(slot for session in sessions for slot in session.writing)
    reads = set(finds.reads)
    pins = Counter(slot for writes in write_behind for slot in writes.slots_being_written())
    for session in sessions:
        for slot, generation in session.writing.items():
            if memory.generations[slot] != generation:
                return f"session {session.name} writes generation {generation} of slot {slot}, which is over"
        for find in session.finds.values():
            pins.update(find.slots)
            pins.update(slot for slot, _ in find.arrived.values())
    for slot in memory.in_use():
        state = memory.states[slot] & ~UNLISTED
        if writers.pop(slot, 0) != (state == WRITING):
            return f"slot {slot} is {STATE_NAMES[state]}, or has two writers"
        if (slot in reads) != (state == READING):
            return f"slot {slot} is {STATE_NAMES[state]}, and read into: {slot in reads}"
        if memory.num_pins(slot) != pins.pop(slot, 0):
            return f"slot {slot} has {memory.num_pins(slot)} pins, but other users"
        reads.discard(slot)
    if writers or pins or reads:
        return f"free slots are used: written {sorted(writers)}, read {sorted(reads)}, pinned {sorted(pins)}"
    return ""
