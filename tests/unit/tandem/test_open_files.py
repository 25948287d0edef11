"""The limit on open files."""

import resource

import pytest

from tandem.open_files import MAX_FILES, raise_open_files_limit

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "allowed", "is_set"),
    [
        ((1024, 4096), 4096, True),
        ((4096, 4096), 4096, False),
        ((1024, INFINITY), MAX_FILES, True),
        ((1024, 2**30), MAX_FILES, True),
        ((2**21, 2**30), 2**21, False),
        ((INFINITY, INFINITY), MAX_FILES, False),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(
    limits: tuple[int, int], allowed: int, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: calls.append(new))
    assert raise_open_files_limit() == allowed
    assert calls == ([(allowed, limits[1])] if is_set else [])
