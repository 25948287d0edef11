"""Opens the collectives of a worker's ranks."""

import shutil
import tempfile
from pathlib import Path

import torch

from tandem.engine.collectives.base import Collectives
from tandem.engine.ranks.group import RankGroup


def open_collectives(group: RankGroup, device: torch.device) -> Collectives | None:
    """Connects the ranks. All call it; None: there is one rank.

    Raises:
        ValueError: there are no collectives for such devices.
    """
    if group.ranks.degree == 1:
        return None
    if device.type != "cpu":
        raise ValueError(f"{group.ranks.degree} ranks cannot compute together on device {device.type}: use 1, or cpu")
    from tandem.engine.collectives.gloo import GlooCollectives

    made = Path(tempfile.mkdtemp(prefix="tandem-ranks-")) if group.ranks.is_leader else None
    try:
        directory = group.of_leader(None if made is None else str(made))
        assert directory is not None
        collectives = GlooCollectives(group.ranks, Path(directory) / "store")
        # The leader removes the file when all are connected.
        group.gathered(None)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    return collectives
