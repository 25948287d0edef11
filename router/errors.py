"""Errors for clients. Each frontend maps the classes to its codes."""

from collections.abc import Iterator
from contextlib import contextmanager

# gRPC drops a status with a message of more than a few kilobytes, and a character may take twelve bytes there.
MAX_MESSAGE_LENGTH = 500


def shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[: MAX_MESSAGE_LENGTH - 1]}…"


class RequestError(Exception):
    """Attributes: outcome: the request's label in the metrics."""

    outcome: str

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class InvalidRequestError(RequestError, ValueError):
    """Attributes: param: the invalid field, or ""."""

    outcome = "invalid"

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = shortened(param)


class UnknownModelError(InvalidRequestError):
    """The model is not served here."""


class UnknownStreamError(InvalidRequestError):
    """The stream to resume is unknown, or belongs to another client."""


class UnknownConversationError(InvalidRequestError):
    """No kept conversation of this key has this id."""


class UnknownResponseError(InvalidRequestError):
    """The response is not kept, or belongs to another client."""


class UnknownPreviousResponseError(UnknownResponseError):
    """The response that a request continues is unknown."""


class LostStreamError(InvalidRequestError):
    """The workers have less of the stream than the client."""


class RequestTooLargeError(InvalidRequestError):
    """The request does not fit the model's length or the workers' pools."""


class PromptTooLongError(ValueError):
    """The prompt does not fit the model's length.

    Clients recognize an overflow by words of the message: "prompt is too long" and "this model's maximum context
    length is".
    """

    def __init__(self, found: str, max_model_len: int) -> None:
        """Args: found: the prompt's size."""
        super().__init__(
            f"the prompt is too long: {found}; this model's maximum context length is {max_model_len} tokens, the "
            "output's first token included"
        )


class UnauthenticatedError(RequestError):
    outcome = "unauthenticated"


class OverloadedError(RequestError):
    """Too many requests wait, or the key has too many in hand."""

    outcome = "overloaded"


class UnavailableError(RequestError):
    outcome = "unavailable"


class RequestTimeoutError(RequestError):
    outcome = "timeout"


class InternalError(RequestError):
    """The router's log has the details."""

    outcome = "error"


@contextmanager
def mistakes_in(param: str) -> Iterator[None]:
    """Turns a ValueError into an InvalidRequestError about this field."""
    try:
        yield
    except InvalidRequestError:
        raise
    except PromptTooLongError as error:
        raise RequestTooLargeError(str(error), param) from error
    except ValueError as error:
        raise InvalidRequestError(str(error), param) from error
