"""What a request is called by its client and by us: in headers and metadata, in answers and in the log."""

import re
import uuid

REQUEST_ID_HEADER = "x-request-id"
# Printable ASCII without spaces: it stands in headers and in lines of logs.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def is_request_id(text: str) -> bool:
    """Whether a client's name of a request can be taken as it is."""
    return _REQUEST_ID.fullmatch(text) is not None


def request_id_of(given: str | None) -> str:
    """The id of a request: its client's, if there is one that can be taken, or a new one. Proxies on the way set such
    headers too, so that one that cannot be taken is no error of the client's."""
    return given if given is not None and is_request_id(given) else uuid.uuid4().hex
