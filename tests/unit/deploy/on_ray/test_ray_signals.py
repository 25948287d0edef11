"""Ray's start keeps this process's signal handlers."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.on_ray.ray_signals import own_signals


class FakeRay:
    """A fake of Ray's modules and ray.init."""

    def __init__(self) -> None:
        self.handlers: list[str] = []
        self.utils: Any = SimpleNamespace(set_sigterm_handler=self.handlers.append)
        self.constants: Any = SimpleNamespace(RAY_DISABLE_FAILURE_SIGNAL_HANDLER=False)

    def init(self) -> None:
        self.utils.set_sigterm_handler("exit")
        if not self.constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER:
            self.handlers.append("print a stack")


def test_no_handler_is_replaced() -> None:
    fake = FakeRay()
    with own_signals(fake.utils, fake.constants):
        fake.init()
    assert fake.handlers == []
    # Outside the context, Ray sets its handlers.
    fake.init()
    assert fake.handlers == ["exit", "print a stack"]


def test_a_stopped_start_restores_everything() -> None:
    fake = FakeRay()
    with pytest.raises(SystemExit), own_signals(fake.utils, fake.constants):
        raise SystemExit(0)
    fake.init()
    assert fake.handlers == ["exit", "print a stack"]


def test_another_version_of_ray_is_left_alone() -> None:
    utils, constants = SimpleNamespace(), SimpleNamespace()
    with own_signals(utils, constants):
        pass
    assert vars(utils) == vars(constants) == {}


def test_the_installed_ray_has_the_patched_attributes() -> None:
    from tandem.deploy.on_ray.ray_module import ray_constants, utils

    assert hasattr(utils, "set_sigterm_handler") and hasattr(ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER")
