"""Python's garbage collector pauses processes rarely and briefly."""

import subprocess
import sys
from pathlib import Path

from tandem.garbage import FULL_COLLECTION_THRESHOLD
from tests.cluster.conftest import save_tiny_model

COUNTS = """
import gc
{actor}
print(gc.get_freeze_count(), gc.get_threshold()[2], gc.get_threshold()[0])
actor.stop()
"""
ROUTER = """
from tandem.deploy.actors.router_actor import RouterActor
from tandem.router.config import RouterConfig
actor = RouterActor(RouterConfig({model_dir!r}, "tiny", 64, grpc_port=0, http_port=0))
actor.start()
"""
WORKER = """
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.actors.worker_actor import WorkerActor
config = ClusterConfig({model_dir!r}, num_pages=8)
actor = WorkerActor(config.worker("both-0", "both", config.engine({model_dir!r}), 64))
actor.start()
"""
SCRIPT = """
import gc, torch
from tandem.garbage import collect_seldom, freeze_objects

looked_at = []

def look(phase, info):
    # Young collections number hundreds; the next one covers their objects too.
    if phase == "start" and info["generation"]:
        looked_at.append((info["generation"], len(gc.get_objects())))

def count():
    looked_at.clear()
    kept = []
    # Long-lived objects, like requests and pages: enough for several full collections by default.
    for _ in range(300_000):
        kept.append([None])
    print(sum(generation == 2 for generation, _ in looked_at), max(num for _, num in looked_at) - len(kept))

gc.callbacks.append(look)
count()
freeze_objects()
collect_seldom()
count()
"""


def run(script: str) -> list[int]:
    """Returns the numbers that the script prints."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return [int(number) for number in done.stdout.split()]


def test_imported_objects_are_never_visited_and_others_rarely() -> None:
    # Collections, and the most objects, without the script's, that one visited.
    num_by_default, visited_by_default, num_full, visited = run(SCRIPT)
    assert num_by_default > 0 and visited_by_default > 50_000
    assert num_full == 0 and visited < 10_000


def test_serving_processes_never_visit_objects_of_their_start(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    model_dir = str(tmp_path / "tiny")
    num_frozen, full_threshold, _ = run(COUNTS.format(actor=WORKER.format(model_dir=model_dir)))
    assert num_frozen > 50_000 and full_threshold == FULL_COLLECTION_THRESHOLD
    # Requests leave cycles at a router, so full collections are as frequent as by default. One step's tokens of some
    # hundred requests must not cause a young collection.
    num_frozen, full_threshold, young_threshold = run(COUNTS.format(actor=ROUTER.format(model_dir=model_dir)))
    assert num_frozen > 20_000 and full_threshold < FULL_COLLECTION_THRESHOLD and young_threshold > 5000
