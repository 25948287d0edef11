"""A body full of errors costs no more than its first one."""

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.router.frontends.openai.schema import CompletionRequest
from tandem.router.frontends.openai.tools_schema import ChatRequest

NUM_ITEMS = 20_000

MANY: list[Any] = [{}] * NUM_ITEMS
MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": MANY},
        {"prompt": [[], *MANY]},
        {"prompt": ["", *MANY]},
        {"prompt": [["x"] * NUM_ITEMS] * 3},
        {"prompt": [[1]] * NUM_ITEMS},
        {"prompt": "hi", "stop": MANY},
        {"prompt": "hi", "stop_token_ids": MANY},
        {"prompt": "hi", "logit_bias": {f"x{i}": {} for i in range(NUM_ITEMS)}},
        {"prompt": "hi", "guided_choice": MANY},
        {"prompt": "hi", "structured_outputs": {"choice": MANY}},
        {"messages": MANY},
        {"messages": [MESSAGE, *({"role": "user", "content": None},) * NUM_ITEMS]},
        {"prompt": "hi", **dict.fromkeys(CompletionRequest.unserved, "x")},
        {"messages": [MESSAGE, {"role": "user", "content": MANY}]},
        {"messages": [MESSAGE], "modalities": MANY},
        {"messages": [MESSAGE], "tools": MANY},
        {"messages": [MESSAGE], "functions": MANY},
        {"messages": [MESSAGE], "documents": MANY},
        {"messages": [MESSAGE], "chat_template_kwargs": {f"x{i}": {} for i in range(NUM_ITEMS)}},
        {"messages": [{"role": "assistant", "tool_calls": MANY}]},
    ],
    ids=lambda fields: "-".join(list(fields)[:3]),
)
def test_the_first_error_in_a_list_is_the_last(fields: dict[str, Any]) -> None:
    # Each costs a kilobyte and microseconds, and a body can hold millions.
    kind = ChatRequest if "messages" in fields else CompletionRequest
    with pytest.raises(ValidationError) as invalid:
        kind.model_validate(fields)
    assert invalid.value.error_count() <= 2
