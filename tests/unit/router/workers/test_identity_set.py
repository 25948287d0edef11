import random

from tandem.router.workers.identity_set import IdentitySet

ALL = 10**9


def test_it_is_a_set() -> None:
    chance = random.Random(0)
    # Neighbours share a bucket, others do not.
    values = [value + offset for value in (0, 2**63, *(chance.getrandbits(63) for _ in range(30))) for offset in (0, 1)]
    own, reference = IdentitySet(), set[int]()
    for _ in range(500):
        some = chance.choices(values, k=chance.randrange(5))
        if chance.randrange(2):
            own.update(some, ALL)
            reference.update(some)
        else:
            own.difference_update(some)
            reference.difference_update(some)
        assert len(own) == len(reference)
        assert [value for value in values if value in own] == [value for value in values if value in reference]


def test_growth_is_limited() -> None:
    own = IdentitySet()
    own.update([5, 5, 2**60, 7], 2)
    assert [value in own for value in (5, 2**60, 7)] == [True, True, False]
    own.update([5], 0)
    own.update([7], 0)
    assert (len(own), 7 in own) == (2, False)
