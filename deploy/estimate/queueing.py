"""What requests that arrive independently of each other (Poisson) wait for, and how many of them run at once.

docs/estimate.md has the formulas in words.
"""

from collections.abc import Callable, Sequence
from math import exp, inf, log

_BISECTIONS = 24
# A request lives through several independent numbers of others beside it. That its slow steps are more than one in
# twenty is so many times as likely as that there are too many of them at a moment, by simulation of decode workers with
# good shares of 0.8 to 0.99.
PEAKS_PER_LIFE = 4


class Running:
    """How many sequences a worker decodes at once.

    Each step gives all of them a token, so they share the worker as in processor sharing: whatever the distribution of
    output lengths, the probability of n is that of n - 1, times the tokens asked for in a step of n, divided by n.

    Attributes:
        shares: of the time, with 0, 1, 2, ... sequences.
        is_stable: whether the worker keeps up with the tokens.
    """

    def __init__(self, steps: Sequence[float], tokens_per_s: float, num_workers: int = 1) -> None:
        """
        Args:
            steps: seconds of a step of 1, 2, ... sequences, as many as a worker runs at most.
            tokens_per_s: that are asked of each worker.
            num_workers: those that new sequences are spread over by their load. The more there are, the less the number
                on each of them varies.
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

    def crowded(self, largest: int) -> float:
        """The share of requests of which more than one step in twenty has more sequences than `largest`: one that comes
        finds as many as there are in the mean of time, and is one more. Where a worker runs no
        more, those that find no place."""
        if not self.is_stable:
            return 1.0
        if largest + 1 == len(self.shares):
            return self.shares[-1]
        return min(1.0, PEAKS_PER_LIFE * sum(self.shares[largest:]))


def late(num_servers: int, utilisation: float, service: float, wait: float) -> float:
    """The share of what arrives that waits longer than `wait` for one of some servers with one line.

    The line is M/D/c's: the probability to wait at all is Erlang's C, and that to wait longer falls exponentially,
    twice as fast as with exponential service times.

    Args:
        utilisation: how busy they are.
        service: seconds that each takes.
        wait: seconds; below 0: not even one that waits for nobody is in time.
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
    """The highest rate up to a limit that is served well, as all below it are; 0: there is none."""
    if not limit:
        return 0.0
    low, high = 0.0, limit
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_served(middle) else (low, middle)
    return low
