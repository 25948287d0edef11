import pytest

from tandem.choices import Choices
from tandem.engine.models.architectures import ARCHITECTURES
from tandem.engine.models.base import Model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_model(name: str) -> None:
    models: Choices[Model] = Choices("tandem.engine.models.base:Model", {name: ARCHITECTURES[name].model})
    assert issubclass(models.load(name), Model)
