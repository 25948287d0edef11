"""Reasons for which a request is not served. The messages are for clients; each frontend maps the classes to codes."""

from collections.abc import Iterator
from contextlib import contextmanager

# gRPC drops a status whose message is longer than a few kilobytes, and a character may take twelve bytes there.
MAX_MESSAGE_LENGTH = 500


def shortened(message: str) -> str:
    """Cuts a message, which may quote the client's input, to MAX_MESSAGE_LENGTH characters."""
    return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[: MAX_MESSAGE_LENGTH - 1]}…"


class RequestError(Exception):
    """Attributes: outcome: label of the request in the metrics."""

    outcome: str

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class InvalidRequestError(RequestError, ValueError):
    """The request cannot be served, now or later.

    Attributes:
        param: the invalid field, or "".
    """

    outcome = "invalid"

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = shortened(param)


class UnknownModelError(InvalidRequestError):
    """The model is not served here."""


class UnknownStreamError(InvalidRequestError):
    """The stream to resume is unknown, or belongs to another client."""


class UnknownResponseError(InvalidRequestError):
    """The response is not kept, or belongs to another client."""


class UnknownPreviousResponseError(UnknownResponseError):
    """The response that a request continues is unknown."""


class LostStreamError(InvalidRequestError):
    """Less is left of the stream than the client has."""


class RequestTooLargeError(InvalidRequestError):
    """The request does not fit the workers' pools."""


class UnauthenticatedError(RequestError):
    """The API key is missing or wrong."""

    outcome = "unauthenticated"


class OverloadedError(RequestError):
    """Too many requests wait already, or the key has too many in hand."""

    outcome = "overloaded"


class UnavailableError(RequestError):
    """No worker can serve the request now."""

    outcome = "unavailable"


class RequestTimeoutError(RequestError):
    """The request took longer than the router allows."""

    outcome = "timeout"


class InternalError(RequestError):
    """The server made a mistake; its log has the details."""

    outcome = "error"


@contextmanager
def mistakes_in(param: str) -> Iterator[None]:
    """Turns a ValueError into an InvalidRequestError about this field."""
    try:
        yield
    except InvalidRequestError:
        raise
    except ValueError as error:
        raise InvalidRequestError(str(error), param) from error
