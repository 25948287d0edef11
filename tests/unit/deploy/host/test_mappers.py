"""Restarts of dead processes wait for mapped memory."""

from tandem.deploy.host.mappers import MAPPED_LIMIT_S, Mappers


def test_a_replacement_waits_for_every_mapper() -> None:
    mappers = Mappers()
    mappers.has_died("d0", ["p0", "p1"], now=0.0)
    assert mappers.to_ask() == {"p0", "p1"} and not mappers.take_released("d0", 1.0)
    mappers.have_answered("p0", [])
    mappers.have_answered("p1", ["d0", "d1"])
    assert mappers.to_ask() == {"p1"} and not mappers.take_released("d0", 1.0)
    mappers.have_answered("p1", ["d1"])
    assert mappers.to_ask() == set() and mappers.take_released("d0", 1.0)


def test_a_mapper_that_dies_maps_nothing() -> None:
    mappers = Mappers()
    mappers.has_died("d0", ["p0"], now=0.0)
    mappers.has_died("p0", ["d1"], now=0.5)
    assert mappers.take_released("d0", 1.0) and not mappers.take_released("p0", 1.0)
    mappers.have_answered("d1", [])
    assert mappers.take_released("p0", 1.0)


def test_a_hung_mapper_delays_a_restart_only_so_long() -> None:
    mappers = Mappers()
    mappers.has_died("d0", ["p0"], now=5.0)
    assert not mappers.take_released("d0", 4.9 + MAPPED_LIMIT_S)
    assert mappers.take_released("d0", 5.0 + MAPPED_LIMIT_S)
    assert mappers.to_ask() == set()


def test_an_unmapped_process_may_start() -> None:
    mappers = Mappers()
    assert mappers.take_released("d0", 0.0)
    mappers.has_died("d0", [], now=0.0)
    assert mappers.take_released("d0", 0.0)
