"""Documentation of the options of `tandem serve`; `make docs` writes it.

docs/configuration.md has a table per group between two comments; examples/serve.yaml is all generated.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tandem.deploy.cli.serve_options import SERVE_OPTIONS
from tandem.deploy.config.cluster_options import GROUPS
from tandem.deploy.config.options import Option

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "docs/configuration.md"
EXAMPLE = ROOT / "examples/serve.yaml"
WIDTH = 120
EXAMPLE_HEAD = """\
# All options of `tandem serve --config serve.yaml`. Commented lines show the defaults. Command-line flags override this
# file. docs/configuration.md has more about each option.
"""
EXAMPLE_MODEL = "smollm2-135m-instruct"
_TABLE = re.compile(r"(?<=<!-- options: )(?P<group>[^>]*)( -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def option_table(group: str) -> str:
    rows = ["| flag | default | |", "|---|---|---|"]
    for option in _of(group):
        flag = f"`--{option.name}{' ' + option.metavar if option.metavar else ''}`"
        if option.shown:
            default = _as_markdown(option.shown)
        elif option.type is bool:
            default = "`false`"
        elif option.default is None:
            default = ""
        else:
            default = f"`{option.default_text}`" if option.default_text else "none"
        rows.append(f"| {flag} | {default} | {_as_markdown(option.help)}{_choices(option, '`')}{option.detail} |")
    return "\n".join(rows) + "\n"


def configuration_page(page: str) -> str:
    return _TABLE.sub(lambda match: f"{match['group']}{match[2]}{option_table(match['group'])}", page)


def example_file() -> str:
    parts = [EXAMPLE_HEAD]
    for group in GROUPS:
        parts.append(f"\n# --- {group} ---\n\n")
        for option in _of(group):
            text = f"# {option.help.replace('--', '')}{_choices(option)}."
            comment = textwrap.fill(text, WIDTH, subsequent_indent="# ", break_on_hyphens=False)
            parts.append(f"{comment}\n{_example_line(option)}\n")
    return "".join(parts)


def _of(group: str) -> Iterator[Option]:
    return (option for option in SERVE_OPTIONS if option.group == group)


def _choices(option: Option, quote: str = "") -> str:
    if not option.choices:
        return ""
    own = [f"{quote}package.module:Class{quote}"] if option.takes_path else []
    return f" ({', '.join([*(f'{quote}{choice}{quote}' for choice in option.choices), *own])})"


def _as_markdown(text: str) -> str:
    return re.sub(r"(--[a-z][a-z-]*|\b\d+\.\d+\.\d+\.\d+(?:/\d+)?\b|#)", r"`\1`", text)


def _example_line(option: Option) -> str:
    if option.default is None and not option.shown and option.name == "model":
        return f"{option.name}: {EXAMPLE_MODEL}"
    if option.is_list:
        value = "[]"
    elif isinstance(option.default, bool):
        value = str(option.default).lower()
    elif isinstance(option.default, float):
        value = f"{option.default:g}"
    else:
        value = str(option.default) if option.default not in (None, "") else '""'
    return f"# {option.name}: {value}"


def main() -> None:
    CONFIGURATION.write_text(configuration_page(CONFIGURATION.read_text()))
    EXAMPLE.write_text(example_file())


if __name__ == "__main__":
    main()
