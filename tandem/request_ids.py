"""A request's id on control messages: minted by the router that owns the request for its whole life, unique over all
routers and all their lives, and readable as to whose it is."""


def make_request_id(router_incarnation: str, number: int) -> str:
    """Args: router_incarnation: names the life of a router; number: no other request of that life has it."""
    return f"{router_incarnation}-{number}"


def router_of(request_id: str) -> str:
    """The incarnation of the router that owns a request."""
    return request_id.rpartition("-")[0]
