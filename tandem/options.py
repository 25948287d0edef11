"""Marks fields of configurations as options of `tandem serve`."""

from dataclasses import field
from typing import Any

OPTION = "option"


def option(default: Any, help: str, *, secret: bool = False, **more: Any) -> Any:
    """Declare a dataclass field that a flag of `tandem serve` and a key of its YAML file set.

    Args:
        default: MISSING if the option must be given.
        secret: keep the value out of the configuration's repr.
        more: attributes of tandem.deploy.config.options.Option. `name` defaults to the field's name with dashes.
    """
    return field(default=default, repr=not secret, metadata={OPTION: {"help": help, **more}})
