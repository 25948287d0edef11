"""docs/models.md lists every supported architecture, and all are compared with transformers."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.engine.models.families.table import ARCHITECTURES
from tandem.engine.weights.resolve import BUILT_IN_MODELS
from tests.fakes.fp8_checkpoints import EXPERTS
from tests.unit.docs.models import PAGE, rows, written, written_by_gguf
from tests.unit.engine.models.test_decoder import VARIANTS


def test_the_table_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.unit.docs.models"


def class_name(model_type: str) -> str:
    """Return transformers' class of a model type."""
    found: Any = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(model_type))]
    return str(found.__name__)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_compared_with_transformers(architecture: str) -> None:
    compared = {class_name(variant.partition("_")[0].replace("-", "_")) for variant in VARIANTS}
    assert architecture in compared
    # All families of experts have FP8 checkpoints of every kind among the tests.
    if ARCHITECTURES[architecture].experts is not None:
        assert architecture in {class_name(family) for family in EXPERTS}


def test_every_architecture_has_one_row() -> None:
    found = [line.split(" | ")[1].strip("`") for line in rows()]
    assert found == list(ARCHITECTURES)


def test_gguf_files_become_supported_models() -> None:
    assert {"LlamaForCausalLM"} <= written_by_gguf() <= set(ARCHITECTURES) and BUILT_IN_MODELS
