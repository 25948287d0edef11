"""Waiting times and batch sizes under Poisson arrivals. docs/estimate.md explains the formulas."""

from collections.abc import Callable, Sequence
from math import exp, inf, lgamma, log

_BISECTIONS = 24
# The batch size changes several times in a request's life. So P(over 5 % of its steps are slow) is this multiple of
# P(the batch is too large at one moment), by simulation of decode workers with good shares of 0.8 to 0.99.
PEAKS_PER_LIFE = 4


class Running:
    """Distribution of a decode worker's batch size.

    Each step gives every sequence a token, as in processor sharing. For any distribution of output lengths,
    P(n) = P(n - 1) * tokens requested during a step of n / n.

    Attributes:
        shares: share of time with 0, 1, 2, ... sequences.
        is_stable: the worker keeps up with the tokens.
    """

    def __init__(self, steps: Sequence[float], tokens_per_s: float, num_workers: int = 1) -> None:
        """
        Args:
            steps: seconds of a step of 1, 2, ... sequences.
            tokens_per_s: requested from each worker.
            num_workers: balanced workers; more reduce the variance on each.
        """
        self.is_stable = tokens_per_s * steps[-1] < len(steps)
        logarithms = [0.0]
        for number, step in enumerate(steps, 1):
            logarithms.append(logarithms[-1] + num_workers * log(tokens_per_s * step / number))
        highest = max(logarithms)
        weights = [exp(logarithm - highest) for logarithm in logarithms]
        total = sum(weights)
        self.shares = [weight / total for weight in weights]

    @property
    def mean(self) -> float:
        return sum(number * share for number, share in enumerate(self.shares))

    def slow_share(self, by_others: Sequence[float]) -> float:
        """Returns the share of requests with over 5 % slow steps; if no step is slow, of those without a place.

        An arriving request sees the time average and adds itself.

        Args:
            by_others: share of slow requests among those that find 0, 1, ... others, one for each place.
        """
        if not self.is_stable:
            return 1.0
        *shares, without_place = self.shares
        if not any(by_others):
            return without_place
        crowded = without_place + sum(share for share, slow in zip(shares, by_others, strict=True) if slow)
        found = without_place + sum(share * slow for share, slow in zip(shares, by_others, strict=True))
        return found * min(PEAKS_PER_LIFE, 1 / crowded) if crowded else 0.0


def late(num_servers: int, utilisation: float, service: float, wait: float) -> float:
    """Returns the share of arrivals that wait longer than `wait` in an M/D/c queue.

    P(waiting) is Erlang's C. The tail is exponential, twice as steep as for exponential service times.

    Args:
        service: seconds per arrival.
        wait: seconds; negative: all are late.
    """
    if wait < 0 or utilisation >= 1:
        return 1.0
    if wait == inf:
        return 0.0
    offered, blocked = num_servers * utilisation, 1.0
    for count in range(1, num_servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    waits = blocked / (1 - utilisation * (1 - blocked))
    return waits * exp(-2 * (1 - utilisation) * num_servers * wait / service)


def highest(is_served: Callable[[float], bool], limit: float) -> float:
    """Returns the highest served rate up to `limit`, by bisection; 0: none. Lower rates must be served too."""
    if not limit:
        return 0.0
    low, high = 0.0, limit
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_served(middle) else (low, middle)
    return low


def more_than(number: int, mean: float) -> float:
    """Returns P(a Poisson variable > number). Args: mean: above 0."""
    return max(0.0, 1 - sum(exp(count * log(mean) - mean - lgamma(count + 1)) for count in range(number + 1)))
