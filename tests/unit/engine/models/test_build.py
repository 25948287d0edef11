import pytest

from tandem.choices import Choices
from tandem.engine.models.base import Model
from tandem.engine.models.families.table import ARCHITECTURES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_model(name: str) -> None:
    models: Choices[Model] = Choices("tandem.engine.models.base:Model", {name: ARCHITECTURES[name].model})
    assert issubclass(models.load(name), Model)
