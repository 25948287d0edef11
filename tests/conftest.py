"""Fixtures that cost too much to make twice."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The demo model as a Hugging Face style directory, converted once per machine."""
    from tandem.engine.weights.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct")
