"""The generated documentation matches the options."""

import re
from dataclasses import fields

from tandem.deploy.cli.reference import CONFIGURATION, EXAMPLE, configuration_page, example_file
from tandem.deploy.cli.serve_options import SERVE_OPTIONS
from tandem.deploy.config.cluster_config import ClusterConfig


def test_the_documentation_is_up_to_date() -> None:
    page = CONFIGURATION.read_text()
    assert configuration_page(page) == page, "run `make docs`"
    assert EXAMPLE.read_text() == example_file(), "run `make docs`"


def test_every_flag_is_documented_with_its_default_and_its_choices() -> None:
    text = CONFIGURATION.read_text()
    defaults = {f.name: f.default for f in fields(ClusterConfig)}
    for option in SERVE_OPTIONS:
        ((default, meaning),) = re.findall(
            rf"^\| `--{option.name}(?: [A-Z.:=a-z]+)?` \| (.*?) \| (.*) \|$", text, flags=re.MULTILINE
        )
        value = defaults.get(option.field)
        if isinstance(value, bool):
            assert default == f"`{str(value).lower()}`"
        elif isinstance(value, int | float | str) and value != "":
            assert (f"{value:g}" if isinstance(value, float) else str(value)) in default, option.name
        assert all(f"`{choice}`" in meaning for choice in option.choices), option.name
        assert ("`package.module:Class`" in meaning) == option.takes_path
    assert "`--config FILE.yaml`" in text


def test_a_page_without_tables_stays_as_it_is() -> None:
    assert configuration_page("# Nothing here\n") == "# Nothing here\n"
