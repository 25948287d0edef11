"""Where a request stands in every queue of a cluster: by its age, with a head start for its priority."""

# A request of priority p stands where one of priority 0 would that came p times so long before it.
HEAD_START_S = 10.0
# Priorities beyond this many steps, up or down, give no more: so nobody waits for ever behind a stream of others.
MAX_STEPS = 12

_HEAD_START_NS = int(HEAD_START_S * 1e9)


def virtual_arrival_ns(arrival_ns: int, priority: int) -> int:
    """When a request of priority 0 would have had to come to stand where this one stands; smaller goes first. It never
    changes, so a queue in this order needs no clock: whoever waits is sooner or later older than all who may come.

    Args:
        arrival_ns: when the router received the request, the same on every attempt.
        priority: larger is sooner.
    """
    return arrival_ns - max(-MAX_STEPS, min(priority, MAX_STEPS)) * _HEAD_START_NS
