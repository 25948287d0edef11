"""What a routing policy is shown of a request."""

import dataclasses

import pytest

from tests.fakes.routing import routing_request


def test_prompt_and_output_make_all_that_an_attempt_needs() -> None:
    request = routing_request([1, 2, 3], output_ids=(4, 5))
    assert (request.token_ids, request.num_prompt_tokens) == ((1, 2, 3, 4, 5), 3)


def test_a_policy_cannot_change_it() -> None:
    request = routing_request()
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.priority = 9
