"""What a worker does to be stopped seldom and shortly by Python's garbage collector."""

import subprocess
import sys

SCRIPT = """
import gc, torch
from tandem.worker.garbage import shorten_pauses

looked_at = []

def look(phase, info):
    if phase == "start":
        looked_at.append((info["generation"], len(gc.get_objects())))

gc.callbacks.append(look)
{call}
looked_at.clear()
kept = []
# Objects that stay, as requests and pages do: enough for several full collections by default.
for _ in range(300_000):
    kept.append([None])
print(sum(generation == 2 for generation, _ in looked_at), max(num for _, num in looked_at) - len(kept))
"""


def full_collections(call: str) -> tuple[int, int]:
    """Their number, and the most objects besides those of the script that any collection had before it."""
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(call=call)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    num_full, num_objects = map(int, printed.split())
    return num_full, num_objects


def test_what_is_imported_is_never_looked_at_again_and_the_rest_seldom() -> None:
    num_full, num_objects = full_collections("shorten_pauses()")
    assert num_full == 0 and num_objects < 10_000
    # The same script sees them where nothing is done about it.
    num_full, num_objects = full_collections("")
    assert num_full > 0 and num_objects > 50_000
