"""A request's place in every queue: its age, with a head start for its priority."""

# Head start per step of priority, in seconds.
HEAD_START_S = 10.0
# Priorities are clipped, so that no request waits forever.
MAX_STEPS = 12

_HEAD_START_NS = int(HEAD_START_S * 1e9)


def virtual_arrival_ns(arrival_ns: int, priority: int) -> int:
    """Return the arrival time of a priority-0 request with the same place in a queue. Smaller goes first.

    The value never changes, so a queue needs no clock, and every waiting request eventually precedes all new ones.

    Args:
        arrival_ns: time at which the router received the request, the same for every attempt.
    """
    return arrival_ns - max(-MAX_STEPS, min(priority, MAX_STEPS)) * _HEAD_START_NS
