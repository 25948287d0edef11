"""Which class computes an architecture."""

import pytest

from engine.models.architectures import ARCHITECTURES
from engine.models.base import Model
from tandem.choices import Choices


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_model(name: str) -> None:
    models: Choices[Model] = Choices("engine.models.base:Model", {name: ARCHITECTURES[name].model})
    assert issubclass(models.load(name), Model)
