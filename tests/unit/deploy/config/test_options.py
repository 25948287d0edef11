"""Options: valid values in files, and names in messages."""

import math
from dataclasses import MISSING, dataclass
from typing import Any

import pytest

from tandem.deploy.config.options import in_flags, options_of
from tandem.options import option


@dataclass(frozen=True)
class Oven:
    recipe: str = option(MISSING, "what to bake", metavar="NAME")
    num_trays: int = option(2, "trays", name="trays")
    max_trays: int = option(9, "trays at most")
    heat: float = option(180.0, "degrees")
    fan: bool = option(False, "with a fan")
    keys: tuple[str, ...] = option((), "who may open it", name="key", secret=True, shown="nobody")
    mode: str = option("low", "how", choices=("low", "high"))
    door: str = option("steel", "of what", choices=("steel", "glass"), takes_path=True)


GROUPS = {"food": ("recipe", "num_trays", "max_trays"), "oven": ("heat", "fan", "keys", "mode", "door")}
OPTIONS = options_of(Oven, GROUPS)
BY_NAME = {o.name: o for o in OPTIONS}


def test_a_field_is_an_option() -> None:
    assert list(BY_NAME) == ["recipe", "trays", "max-trays", "heat", "fan", "key", "mode", "door"]
    trays = BY_NAME["trays"]
    assert (trays.field, trays.type, trays.group, trays.default) == ("num_trays", int, "food", 2)
    assert BY_NAME["key"].is_list and BY_NAME["key"].type is str
    assert BY_NAME["recipe"].default is None
    assert Oven("bread") == Oven("bread", 2, 9, 180.0, False, (), "low", "steel")
    assert "secret" not in repr(Oven("bread", keys=("secret",)))


@pytest.mark.parametrize(
    ("food", "wrong"),
    [
        (("recipe", "num_trays"), "max_trays"),
        ((*GROUPS["food"], "keys"), "keys"),
        ((*GROUPS["food"], "salt"), "salt"),
    ],
)
def test_every_field_is_in_one_group(food: tuple[str, ...], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"each field of Oven must be in exactly one group: see {wrong}$"):
        options_of(Oven, GROUPS | {"food": food})


def test_what_is_said_of_defaults() -> None:
    texts = {name: o.default_text for name, o in BY_NAME.items()}
    assert texts == {
        "recipe": "",
        "trays": "2",
        "max-trays": "9",
        "heat": "180",
        "fan": "",
        "key": "nobody",
        "mode": "low",
        "door": "steel",
    }


@pytest.mark.parametrize(
    ("name", "value", "checked"),
    [
        ("trays", 3, 3),
        ("heat", 200, 200.0),
        ("fan", True, True),
        ("key", ["a"], ("a",)),
        ("door", "my.doors:Oak", "my.doors:Oak"),
    ],
)
def test_a_right_value_of_a_file(name: str, value: Any, checked: Any) -> None:
    assert BY_NAME[name].check(value) == checked


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("trays", "3", "trays must be a whole number, not text"),
        ("trays", True, "trays must be a whole number, not true or false"),
        ("heat", math.nan, "heat must be a finite number"),
        ("key", "secret", "key must be a list of quoted texts"),
        ("key", ["secret", 7], "key must be a list of quoted texts"),
        ("mode", "middle", "mode must be one of low, high, not 'middle'"),
    ],
)
def test_a_wrong_value_of_a_file(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        BY_NAME[name].check(value)
    assert "secret" not in str(refusal.value)


def test_messages_name_flags_where_there_are_flags() -> None:
    message = "num_trays 12 is above max_trays 9; the door is shut: set `heat` to 0 or use a smaller num_trays"
    assert in_flags(message, OPTIONS) == (
        "--trays 12 is above --max-trays 9; the door is shut: set --heat to 0 or use a smaller --trays"
    )
    path = "num_trays:Mine, my.num_trays:Mine, my.num_trays.of:Mine and /a/num_trays/b stay"
    assert in_flags(path, OPTIONS) == path
    assert in_flags("the sum of num_trays. It", OPTIONS) == "the sum of --trays. It"
    assert in_flags("num_trays_left and other_num_trays stay", OPTIONS) == "num_trays_left and other_num_trays stay"
