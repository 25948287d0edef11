"""Choice of nodes for a cluster's processes."""

import pytest

from tandem.deploy.config.node_choice import PACK, SPREAD, FreeNode, choose_nodes

ON_CPU = {"CPU": 1.0}
ON_GPU = {"CPU": 1.0, "GPU": 1.0}


def nodes(*free: dict[str, float]) -> list[FreeNode]:
    return [FreeNode(f"id {i}", f"10.0.0.{i}", amounts) for i, amounts in enumerate(free)]


def chosen(found: list[str]) -> list[int]:
    return [int(address.rpartition(".")[2]) for address in found]


def test_packed_workers_fill_this_host_first_and_then_the_one_with_most_room() -> None:
    have = nodes({"CPU": 2}, {"CPU": 1}, {"CPU": 4})
    assert chosen(choose_nodes(have, [ON_CPU] * 5, PACK)) == [0, 0, 2, 2, 2]


def test_a_host_without_what_workers_take_gets_none() -> None:
    have = nodes({"CPU": 64}, {"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 8})
    assert chosen(choose_nodes(have, [ON_GPU] * 8, PACK)) == [2] * 8
    assert chosen(choose_nodes(have, [ON_GPU] * 4, SPREAD)) == [2, 1, 2, 1]


def test_spread_workers_of_both_roles_are_on_every_node() -> None:
    have = nodes({"CPU": 4}, {"CPU": 4})
    prefill, decode = 2, 2
    places = chosen(choose_nodes(have, [ON_CPU] * (prefill + decode), SPREAD))
    assert set(places[:prefill]) == set(places[prefill:]) == {0, 1}


def test_what_is_full_is_passed_over() -> None:
    have = nodes({"CPU": 1}, {"CPU": 3})
    assert chosen(choose_nodes(have, [ON_CPU] * 4, SPREAD)) == [0, 1, 1, 1]


def test_too_little_room_is_said_with_what_there_is() -> None:
    have = nodes({"CPU": 1, "GPU": 1}, {"CPU": 3})
    with pytest.raises(
        ValueError, match=r"room for 1 CPU, 1 GPU.*10\.0\.0\.0 has 0 CPU, 0 GPU; 10\.0\.0\.1 has 3 CPU, 0"
    ):
        choose_nodes(have, [ON_GPU] * 2, SPREAD)
