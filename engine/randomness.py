"""Random numbers as a function of a request's seed and a position.

No generator state has to survive a handover or a restart.
"""

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) with 53 random bits.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) at step `position`. The
    seed is mixed first: otherwise seeds that differ by a multiple of the increment would give overlapping numbers.

    Args:
        seed: 64 bits.
        position: index of the token in the whole sequence, prompt included.
    """
    return (_mix(_mix(seed) + position * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN_GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
