import dataclasses

import pytest

from tests.fakes.routing import routing_request


def test_token_ids_are_prompt_and_output() -> None:
    request = routing_request([1, 2, 3], output_ids=(4, 5))
    assert (request.token_ids, request.num_prompt_tokens) == ((1, 2, 3, 4, 5), 3)


def test_request_is_immutable() -> None:
    request = routing_request()
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.priority = 9
