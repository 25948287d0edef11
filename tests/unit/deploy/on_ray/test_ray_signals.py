"""Ray's start leaves this process's handlers alone, and all of Ray's is as before afterwards."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.on_ray.ray_signals import own_signals


class FakeRay:
    """Stands for Ray's modules, and for what its init does with them."""

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
    # A Ray of somebody else's in this process has its handlers.
    fake.init()
    assert fake.handlers == ["exit", "print a stack"]


def test_all_is_as_before_after_a_start_that_was_stopped() -> None:
    fake = FakeRay()
    with pytest.raises(SystemExit), own_signals(fake.utils, fake.constants):
        raise SystemExit(0)
    fake.init()
    assert fake.handlers == ["exit", "print a stack"]


def test_a_ray_that_works_in_another_way_is_left_alone() -> None:
    utils, constants = SimpleNamespace(), SimpleNamespace()
    with own_signals(utils, constants):
        pass
    assert vars(utils) == vars(constants) == {}


def test_this_ray_has_what_is_changed() -> None:
    from tandem.deploy.on_ray.ray_module import ray_constants, utils

    assert hasattr(utils, "set_sigterm_handler") and hasattr(ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER")
