"""Request ids of control messages, unique over all routers and incarnations."""


def make_request_id(router_incarnation: str, number: int) -> str:
    return f"{router_incarnation}-{number}"


def router_of(request_id: str) -> str:
    """Return the incarnation of the router that owns a request."""
    return request_id.rpartition("-")[0]
