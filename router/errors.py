"""Why a request is not served. The messages are for clients; each frontend has one table of codes for these."""

from collections.abc import Iterator
from contextlib import contextmanager

# gRPC drops a status whose message has more than some thousand bytes, and a character may take twelve there.
MAX_MESSAGE_LENGTH = 500


def shortened(message: str) -> str:
    """At most MAX_MESSAGE_LENGTH characters of a message, which may quote what the client sent."""
    return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[: MAX_MESSAGE_LENGTH - 1]}…"


class RequestError(Exception):
    """Attributes: outcome: what the request counts as in the metrics."""

    outcome: str

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class InvalidRequestError(RequestError, ValueError):
    """Nothing of this kind can be served, now or later.

    Attributes:
        param: the field that is wrong, or "".
    """

    outcome = "invalid"

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = shortened(param)


class UnknownModelError(InvalidRequestError):
    """Another model is served here."""


class UnknownStreamError(InvalidRequestError):
    """Nothing is known of the stream that a client wants to go on with, or it is not this client's."""


class UnknownResponseError(InvalidRequestError):
    """No response of this name is kept, or it is not this client's."""


class UnknownPreviousResponseError(UnknownResponseError):
    """The one that a request goes on with."""


class LostStreamError(InvalidRequestError):
    """Less is left of the stream than the client has."""


class RequestTooLargeError(InvalidRequestError):
    """The request does not fit the workers' pools."""


class UnauthenticatedError(RequestError):
    """The API key is missing or wrong."""

    outcome = "unauthenticated"


class OverloadedError(RequestError):
    """Too many requests wait already, or are in hand for one key."""

    outcome = "overloaded"


class UnavailableError(RequestError):
    """No worker can serve the request now."""

    outcome = "unavailable"


class RequestTimeoutError(RequestError):
    """The request took longer than the router allows."""

    outcome = "timeout"


class InternalError(RequestError):
    """A mistake of the server's own, which its log tells about."""

    outcome = "error"


@contextmanager
def mistakes_in(param: str) -> Iterator[None]:
    """What is wrong within is the client's mistake, in this field."""
    try:
        yield
    except InvalidRequestError:
        raise
    except ValueError as error:
        raise InvalidRequestError(str(error), param) from error
