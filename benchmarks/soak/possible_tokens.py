"""The tokens that a sampler may choose from logits which are known up to rounding.

A sampler draws the first token where the cumulative probability exceeds a random u. Where many tokens are about equally
likely, rounding moves the boundaries between them, and rightly another token is drawn.
"""

import math

import torch

from tandem.sampling_params import SamplingParams

# A logit's largest error. Batches and transformers differ by up to 8e-5 in float32, a wrong page by far more than 0.01.
# At temperature 0.7 it moves a boundary by at most 0.0002 of the whole probability.
NOISE = 3e-4


def possible_tokens(logits: torch.Tensor, sampling: SamplingParams, u: float, noise: float = NOISE) -> torch.Tensor:
    """Return the tokens that may be chosen if each logit is off by up to `noise`: (vocab_size,) bool.

    Args:
        logits: (vocab_size,), after penalties; -inf for forbidden tokens.
        u: in [0, 1).
    """
    if sampling.is_greedy:
        return logits >= logits.max() - 2 * noise
    x = (logits.double() - logits.max().double()) / sampling.temperature
    # Largest error of a difference.
    error = 2 * noise / sampling.temperature
    surely, perhaps = _kept(x, sampling, error)
    sure, maybe = (torch.where(kept, x.exp(), 0.0) for kept in (surely, perhaps))
    sure_to, maybe_to = sure.cumsum(0), maybe.cumsum(0)
    sure_before, maybe_before = sure_to - sure, maybe_to - maybe
    # A drawn token is kept itself.
    start = _share(sure_before, maybe_to[-1] - maybe_before, -error)
    end = _share(maybe_to, sure_to[-1] - sure_to, error)
    return perhaps & (start <= u) & (u < end)


def _kept(x: torch.Tensor, sampling: SamplingParams, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that are kept in spite of all errors, and those that some errors keep."""
    surely = perhaps = x > -torch.inf
    if sampling.min_p > 0:
        limit = math.log(sampling.min_p)
        surely, perhaps = surely & (x >= limit + error), perhaps & (x >= limit - error)
    if sampling.top_k > 0:
        rising = x.sort().values
        num_near = len(x) - torch.searchsorted(rising, x - error)
        num_above = len(x) - torch.searchsorted(rising, x + error, right=True)
        surely, perhaps = surely & (num_near <= sampling.top_k), perhaps & (num_above < sampling.top_k)
    if sampling.top_p < 1:
        own = torch.where(perhaps, x.exp(), 0.0)
        # Perhaps, or surely, in front of a token.
        most = _mass_from(x, perhaps, x - error) - own
        least = _mass_from(x, surely, x + error, above=True)
        rest_of_most = _total(x, surely) - _mass_from(x, surely, x - error) + own
        rest_of_least = _total(x, perhaps) - _mass_from(x, perhaps, x + error, above=True)
        is_first = x >= -error
        surely, perhaps = (
            surely & (_share(most, rest_of_most, error) < sampling.top_p),
            perhaps & ((_share(least, rest_of_least, -error) < sampling.top_p) | is_first),
        )
    return surely, perhaps


def _total(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, x.exp(), 0.0).sum()


def _mass_from(x: torch.Tensor, kept: torch.Tensor, limit: torch.Tensor, *, above: bool = False) -> torch.Tensor:
    """Return for each limit the mass of the kept tokens that reach it, or lie above it."""
    rising, order = x.sort()
    mass = torch.where(kept, x.exp(), 0.0)[order]
    # From each place in the order to its end.
    to_end = torch.cat([mass.flip(0).cumsum(0).flip(0), mass.new_zeros(1)])
    return to_end[torch.searchsorted(rising, limit, right=above)]


def _share(part: torch.Tensor, rest: torch.Tensor, error: float) -> torch.Tensor:
    """Return part / (part + rest), with the odds off by a factor of exp(error)."""
    part = part * math.exp(error)
    return part / (part + rest)
