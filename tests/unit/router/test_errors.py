import pytest

from tandem.router import errors
from tandem.router.errors import MAX_MESSAGE_LENGTH, InvalidRequestError, RequestError
from tandem.router.frontends.grpc import STATUS_CODES
from tandem.router.frontends.openai.errors import HTTP_ERRORS, error_object

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
SERVED = [kind for kind in CLASSES if kind is not RequestError]


@pytest.mark.parametrize("kind", SERVED)
def test_every_error_is_counted_and_has_a_code_in_both_protocols(kind: type[RequestError]) -> None:
    assert kind.outcome
    assert any(issubclass(kind, known) for known, _ in STATUS_CODES)
    assert any(issubclass(kind, known) for known, _ in HTTP_ERRORS)
    assert error_object(kind("why"))["error"]["message"] == "why"


@pytest.mark.parametrize("table", [STATUS_CODES, HTTP_ERRORS])
def test_no_error_stands_behind_one_that_covers_it(table: tuple[tuple[type[RequestError], object], ...]) -> None:
    kinds = [kind for kind, _ in table]
    for position, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:position])


def test_what_a_message_quotes_is_cut() -> None:
    error = InvalidRequestError("x" * (MAX_MESSAGE_LENGTH + 1), "y" * (MAX_MESSAGE_LENGTH + 1))
    assert len(str(error)) == len(error.param) == MAX_MESSAGE_LENGTH and str(error).endswith("…")
    assert str(InvalidRequestError("x" * MAX_MESSAGE_LENGTH)) == "x" * MAX_MESSAGE_LENGTH
