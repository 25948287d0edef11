"""Reads the configuration of `tandem serve` from flags, YAML file and environment."""

import argparse
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.deploy.cli.serve_options import ADMIN_KEY_VARIABLE, API_KEY_FILE, API_KEY_VARIABLE, SERVE_OPTIONS
from tandem.deploy.config.bounds import COUNT_FIELDS, Bounds
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.options import in_flags, kind_of
from tandem.deploy.config.otlp_endpoint import otlp_endpoint
from tandem.key_file import KeyFile, read_key_file


def cluster_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ClusterConfig:
    """Raises ValueError with a message of one line."""
    values: dict[str, Any] = {}
    if arguments.config is not None:
        values |= read_file(Path(arguments.config))
    flags = {option.field: getattr(arguments, option.field) for option in SERVE_OPTIONS}
    for option in SERVE_OPTIONS:
        # In a file, "" is a default.
        if option.choices and flags[option.field] == "":
            raise ValueError(f"--{option.name} must be one of {', '.join(option.choices)}, not ''")
    values |= {
        target: tuple(value) if isinstance(value, list) else value
        for target, value in flags.items()
        if value is not None
    }
    if "model" not in values:
        raise ValueError("which model? give --model, or a line `model: ...` in the file of --config")
    for name in ("num_prefill", "num_decode"):
        values.setdefault(name, 0 if values.get("num_both") or values.get("num_any") else 1)
    values["bounds"] = {
        kind: given for kind, name in COUNT_FIELDS.items() if isinstance(given := values.get(name), Bounds)
    }
    values |= {COUNT_FIELDS[kind]: bounds.low for kind, bounds in values["bounds"].items()}
    keys = list(values.get("api_keys", ()))
    if key := environment.get(API_KEY_VARIABLE, ""):
        keys.append(key)
    if key_file := values.pop(API_KEY_FILE.field, ""):
        # The processes may have other working directories.
        values["key_file"] = KeyFile(str(Path(key_file).absolute()), tuple(keys))
        keys += read_key_file(Path(key_file))
    values["api_keys"] = tuple(dict.fromkeys(keys))
    if admin_key := environment.get(ADMIN_KEY_VARIABLE, ""):
        values["admin_keys"] = tuple(dict.fromkeys((*values.get("admin_keys", ()), admin_key)))
    values["otlp_endpoint"] = otlp_endpoint(values.get("otlp_endpoint", ""), environment)
    try:
        return ClusterConfig(**values)
    except ValueError as error:
        raise ValueError(in_flags(str(error), SERVE_OPTIONS)) from error


def read_file(path: Path) -> dict[str, Any]:
    """Returns a YAML file's values by field. Raises ValueError; the message names file and key."""
    try:
        text = path.read_text(encoding="utf-8")
        # The nodes show duplicate keys; the content has only the last value.
        node, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{path} is not valid YAML: {error.problem or error.context}{where}") from error
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML raises a bare ValueError for an invalid date such as 2024-13-45.
        raise ValueError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path} must be a mapping of lines such as `prefill: 2`, not {kind_of(content)}")
    keys = [key.value for key, _ in node.value]
    options = {option.name: option for option in SERVE_OPTIONS}
    for key in keys:
        if key not in options:
            raise ValueError(f"{path}: unknown key {key!r}{_suggestion(str(key), list(options))}")
        if keys.count(key) > 1:
            raise ValueError(f"{path}: {key} is there twice")
    try:
        # YAML reads the bounds 1:8 as a number of base 60.
        written = {key.value: value.value for key, value in node.value if isinstance(value, yaml.ScalarNode)}
        given = {
            key: written[key] if options[key].takes_bounds and type(value) is int else value
            for key, value in content.items()
        }
        return {options[key].field: options[key].check(value) for key, value in given.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _suggestion(key: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(key.strip("-").replace("_", "-"), names, n=1)
    return f", did you mean {nearest[0]!r}?" if nearest else ""
