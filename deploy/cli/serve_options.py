"""The flags of `tandem serve`."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from tandem.deploy.config.bounds import count_argument
from tandem.deploy.config.cluster_options import GROUPS, OPTIONS, SECURITY
from tandem.deploy.config.options import Option

API_KEY_VARIABLE = "TANDEM_API_KEY"
ADMIN_KEY_VARIABLE = "TANDEM_ADMIN_KEY"
CONFIG_FILE = "config"

# A second source of api_keys, so no field of ClusterConfig.
API_KEY_FILE = Option(
    "api-key-file",
    "api_key_file",
    str,
    SECURITY,
    "file with more keys, one per line, as KEY or KEY N; blank lines and lines that start with # are skipped; "
    "read again when it changes",
    default="",
    metavar="FILE",
)
_AFTER = [option.field for option in OPTIONS].index("api_keys") + 1
SERVE_OPTIONS = (*OPTIONS[:_AFTER], API_KEY_FILE, *OPTIONS[_AFTER:])

EPILOG = f"""\
A YAML file may set every flag except --config and --detach, under its name
without leading dashes (prefill: 2, api-key: [FIRST, SECOND]). Flags override
the file. Paths in the file are relative to the current directory.
${API_KEY_VARIABLE}, if set, is one more API key. A class of your own may replace a
policy or implementation (--routing package.module:Class; docs/extending.md).

examples:
  one prefill and two decode workers, for clients on this host:
    tandem serve --model smollm2-135m-instruct --prefill 1 --decode 2
  the cluster of cluster.yaml, on other ports:
    tandem serve --config cluster.yaml --grpc-port 50061 --http-port 8001
  as many workers as the load needs, between one and eight:
    tandem serve --model org/name --workers 1:8
  for clients on other hosts, with API keys and TLS:
    tandem serve --model org/name --host 0.0.0.0 --api-key-file keys.txt \\
      --tls-cert cert.pem --tls-key key.pem
"""


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    groups["operation"].add_argument(
        "--config", dest=CONFIG_FILE, metavar="FILE.yaml", help="file with any of these options"
    )
    for option in SERVE_OPTIONS:
        if option.type is bool:
            groups[option.group].add_argument(
                f"--{option.name}", dest=option.field, action="store_true", default=None, help=_help(option)
            )
            continue
        # ClusterConfig checks values that may be import paths.
        metavar = "{" + ",".join(option.choices) + "}" if option.takes_path else option.metavar
        groups[option.group].add_argument(
            f"--{option.name}",
            dest=option.field,
            type=_parser(option),
            action="append" if option.is_list else "store",
            metavar=metavar or None,
            choices=None if option.takes_path else option.choices or None,
            help=_help(option),
        )


def _parser(option: Option) -> Callable[[str], Any]:
    if option.takes_bounds:
        return count_argument
    return _finite if option.type is float else option.type


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
