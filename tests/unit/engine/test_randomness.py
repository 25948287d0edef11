"""Random numbers against their definition and statistics."""

import numpy as np

from tandem.engine import randomness
from tandem.engine.randomness import uniform, uniforms


def test_uniform_numbers() -> None:
    for numbers in (
        [uniform(seed, 17) for seed in range(50_000)],
        [uniform(3, position) for position in range(50_000)],
        [uniform(2**64 - 1 - seed, seed) for seed in range(50_000)],
    ):
        assert min(numbers) >= 0 and max(numbers) < 1
        counts = np.bincount((np.array(numbers) * 100).astype(int), minlength=100)
        # 99 degrees of freedom: above 160 once in 10,000.
        assert ((counts - 500) ** 2 / 500).sum() < 160
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_uniform_is_splitmix64() -> None:
    # First outputs of the authors' C code, seeded with 1234567.
    assert randomness._mix(1234567) == 6457827717110365317
    assert randomness._mix(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973
    state = randomness._mix(42)
    for position in range(5):
        expected = randomness._mix((state + position * 0x9E3779B97F4A7C15) % 2**64)
        assert uniform(42, position) == (expected >> 11) / 2**53


def test_many_numbers_at_once_are_those_of_each() -> None:
    seeds, positions = [0, 1, 2**63 + 5, 2**64 - 1, 42], np.array([0, 7, 2**40, 1, 99_999])
    expected = [uniform(seed, position) for seed, position in zip(seeds, positions.tolist(), strict=True)]
    assert uniforms(seeds, positions).tolist() == expected
    assert uniforms(seeds, np.stack((positions + 1, positions)))[1].tolist() == expected
