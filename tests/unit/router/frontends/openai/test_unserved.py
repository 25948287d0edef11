"""The tables of other servers' fields."""

from itertools import combinations

import pytest

from tandem.router.frontends.openai import unserved
from tandem.router.frontends.openai.schema import ChatCompletionRequest, ChatMessage, CompletionRequest
from tandem.router.frontends.openai.structured_schema import StructuredOutputs


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest, ChatMessage, StructuredOutputs])
def test_a_field_is_served_or_not_or_a_hint(kind: type[CompletionRequest]) -> None:
    declared = {field.alias or name for name, field in kind.model_fields.items()}
    for one, other in combinations((declared, set(kind.unserved), set(kind.hints)), 2):
        assert not one & other


def test_every_refusal_is_a_plain_line() -> None:
    tables = (unserved.REQUEST, unserved.COMPLETION, unserved.CHAT, unserved.STRUCTURED_OUTPUTS, unserved.MESSAGE)
    for table in tables:
        for field in table.values():
            assert 10 < len(field.refusal) < 120 and field.refusal.isprintable()
            assert all(field.takes(value) for value in (*field.taken, None))
            assert not field.takes(object())
