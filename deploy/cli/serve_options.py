"""The flags of `tandem serve`, from the table of options."""

import argparse
import math

from tandem.deploy.config.cluster_options import GROUPS, OPTIONS, SECURITY
from tandem.deploy.config.options import Option

API_KEY_VARIABLE = "TANDEM_API_KEY"
CONFIG_FILE = "config"

# It is a source of api_keys besides the option itself, and says not what a cluster is, but where to read it.
API_KEY_FILE = Option(
    "api-key-file",
    "api_key_file",
    str,
    SECURITY,
    "file with more keys, one per line, as KEY or KEY N; blank lines and lines that start with # are skipped",
    default="",
    metavar="FILE",
)
_AFTER = [option.field for option in OPTIONS].index("api_keys") + 1
SERVE_OPTIONS = (*OPTIONS[:_AFTER], API_KEY_FILE, *OPTIONS[_AFTER:])

EPILOG = f"""\
Every flag but --config and --detach can stand in a YAML file, under its name without the
dashes in front (prefill: 2, api-key: [FIRST, SECOND]). A flag goes before the
file, the file before the defaults; paths in the file are relative to the
current directory. ${API_KEY_VARIABLE}, if set, is one more API key. Where a
policy or a kind of implementation is chosen by name, a class of your own can
stand in its place (--routing package.module:Class; docs/extending.md).

examples:
  one prefill and two decode workers, for clients on this host:
    tandem serve --model smollm2-135m-instruct --prefill 1 --decode 2
  what cluster.yaml says, but on other ports:
    tandem serve --config cluster.yaml --grpc-port 50061 --http-port 8001
  for clients on other hosts, with API keys and TLS:
    tandem serve --model org/name --host 0.0.0.0 --api-key-file keys.txt \\
      --tls-cert cert.pem --tls-key key.pem
"""


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option's flag; tandem.deploy.cli.serve_config reads them."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    groups["operation"].add_argument(
        "--config", dest=CONFIG_FILE, metavar="FILE.yaml", help="a file with any of these options"
    )
    for option in SERVE_OPTIONS:
        if option.type is bool:
            groups[option.group].add_argument(
                f"--{option.name}", dest=option.field, action="store_true", default=None, help=_help(option)
            )
            continue
        # What may be a class of the user's own is checked with the rest of the configuration.
        metavar = "{" + ",".join(option.choices) + "}" if option.takes_path else option.metavar
        groups[option.group].add_argument(
            f"--{option.name}",
            dest=option.field,
            type=_finite if option.type is float else option.type,
            action="append" if option.is_list else "store",
            metavar=metavar or None,
            choices=None if option.takes_path else option.choices or None,
            help=_help(option),
        )


def _help(option: Option) -> str:
    default = option.default_text
    return (f"{option.help} (default: {default})" if default else option.help).replace("%", "%%")


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number without a unit, not {text!r}") from None
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text}")
    return number
