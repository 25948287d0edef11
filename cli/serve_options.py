"""The options of `tandem serve`: one table, from which come the flags, the keys of the YAML file, and the help."""

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any

from deploy.cluster_config import CPU_DEFAULTS, GPU_DEFAULTS, ClusterConfig
from tandem.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    EVICTION_POLICIES,
    LOG_LEVELS,
    PREFILL_POLICIES,
    ROUTING_POLICIES,
    TRANSPORTS,
)

API_KEY_VARIABLE = "TANDEM_API_KEY"
API_KEY_FILE = "api_key_file"
CONFIG_FILE = "config"

GROUPS = ("model", "workers", "memory and scheduling", "clients' ports", "security", "operation")
EPILOG = f"""\
Every flag but --config can stand in a YAML file, under its name without the
dashes in front (prefill: 2, api-key: [FIRST, SECOND]). A flag goes before the
file, the file before the defaults; paths in the file are relative to the
current directory. ${API_KEY_VARIABLE}, if set, is one more API key.

examples:
  one prefill and two decode workers, for clients on this host:
    tandem serve --model smollm2-135m-instruct --prefill 1 --decode 2
  what cluster.yaml says, but on other ports:
    tandem serve --config cluster.yaml --grpc-port 50061 --http-port 8001
  for clients on other hosts, with API keys and TLS:
    tandem serve --model org/name --host 0.0.0.0 --api-key-file keys.txt \\
      --tls-cert cert.pem --tls-key key.pem
"""

_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
    bool: "true or false",
    type(None): "nothing",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: the flag without its dashes in front, and the key in the YAML file.
        type: of its value: str, int, float, or bool for a flag without a value.
        field: of ClusterConfig; empty: the name with underscores.
        default: what the help says of the default; empty: ClusterConfig's, if that is worth a word.
        is_list: may be given several times; a list in the file.
    """

    name: str
    group: str
    type: type
    help: str
    metavar: str = ""
    field: str = ""
    default: str = ""
    choices: tuple[str, ...] = ()
    is_list: bool = False

    @property
    def target(self) -> str:
        return self.field or self.name.replace("-", "_")

    def check(self, value: Any) -> Any:
        """A value of the YAML file as the option's type. Raises ValueError; the message never repeats the value of a
        list, which may be a secret."""
        if self.is_list:
            if not isinstance(value, list) or not all(type(item) is self.type for item in value):
                raise ValueError(f"{self.name} must be a list of quoted texts, such as ['FIRST', 'SECOND']")
            return tuple(value)
        if self.type is float and type(value) is int:
            return float(value)
        if type(value) is not self.type:
            raise ValueError(f"{self.name} must be {_KINDS[self.type]}, not {kind_of(value)}")
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.name} must be a finite number")
        return value


OPTIONS = (
    Option("model", "model", str, "directory, hub id, .gguf file, or smollm2-135m-instruct", "MODEL"),
    Option(
        "load-format",
        "model",
        str,
        "auto: the model's weights; dummy: random ones, which need only its config and tokenizer",
        choices=("auto", "dummy"),
    ),
    Option(
        "dtype",
        "model",
        str,
        "number format of weights and KV pages; auto: bfloat16 on a GPU, float32 on a CPU",
        choices=("auto", *DTYPES),
    ),
    Option("max-model-len", "model", int, "prompt and output tokens; 0: as many as model and --num-pages allow", "N"),
    Option("prefill", "workers", int, "prefill workers", "N", "num_prefill", "1, or 0 with --both"),
    Option("decode", "workers", int, "decode workers", "N", "num_decode", "1, or 0 with --both"),
    Option("both", "workers", int, "workers that prefill and decode", "N", "num_both"),
    Option("device", "workers", str, "where the workers compute", choices=DEVICES),
    Option("threads", "workers", int, "CPU threads of each worker; 0: cores / workers", "N", "num_threads"),
    Option(
        "transport",
        "workers",
        str,
        "how KV pages travel between workers; auto: the best that both have",
        choices=("auto", *TRANSPORTS),
    ),
    Option(
        "attention-backend",
        "workers",
        str,
        "attention kernels; auto: FlashInfer on a GPU, where it has them for the dtype, else the reference",
        choices=ATTENTION_BACKENDS,
    ),
    Option("cuda-graph-max-bs", "workers", int, "largest decode batch that runs as a CUDA graph; 0: none", "N"),
    Option("page-size", "memory and scheduling", int, "tokens in a page", "N"),
    Option(
        "num-pages",
        "memory and scheduling",
        int,
        f"pages in each worker's pool; 0: {CPU_DEFAULTS.num_pages} on a CPU, as many as fit on a GPU",
        "N",
    ),
    Option(
        "mem-fraction-static",
        "memory and scheduling",
        float,
        "share of a GPU's memory that weights, CUDA graphs and, without --num-pages, the pool may take together",
        "SHARE",
    ),
    Option(
        "chunk-size",
        "memory and scheduling",
        int,
        f"prompt tokens in one prefill forward; 0: {CPU_DEFAULTS.chunk_size} on a CPU, {GPU_DEFAULTS.chunk_size} on a "
        "GPU",
        "N",
    ),
    Option(
        "max-batch-size",
        "memory and scheduling",
        int,
        f"requests in one decode step; 0: {CPU_DEFAULTS.max_batch_size} on a CPU, {GPU_DEFAULTS.max_batch_size} on a "
        "GPU",
        "N",
    ),
    Option(
        "disable-overlap-schedule",
        "memory and scheduling",
        bool,
        "launch a forward on a GPU only when the results of the one before are known; for debugging",
    ),
    Option("schedule", "memory and scheduling", str, "which prompt is computed next", choices=PREFILL_POLICIES),
    Option("eviction", "memory and scheduling", str, "which cached page goes first", choices=EVICTION_POLICIES),
    Option("routing", "memory and scheduling", str, "which workers serve a request", choices=ROUTING_POLICIES),
    Option("host", "clients' ports", str, "address of both ports; 0.0.0.0: reachable from other hosts", "ADDRESS"),
    Option("grpc-port", "clients' ports", int, "port of the gRPC API; 0 picks a free one", "PORT"),
    Option("http-port", "clients' ports", int, "port of the HTTP API; 0 picks a free one", "PORT"),
    Option("max-body-bytes", "clients' ports", int, "size of a request; a larger one is refused", "N"),
    Option(
        "max-queued-requests",
        "clients' ports",
        int,
        "requests that wait for their first token; further ones are refused",
        "N",
    ),
    Option(
        "request-timeout", "clients' ports", float, "a request that takes longer fails", "SECONDS", "request_timeout_s"
    ),
    Option(
        "api-key",
        "security",
        str,
        "a key that lets a client in, repeatable; others on this host can see it in the process list, unlike those of "
        "--api-key-file",
        "KEY",
        "api_keys",
        "none: everybody is let in",
        is_list=True,
    ),
    Option(
        "api-key-file",
        "security",
        str,
        "a file with more keys, one a line; blank lines and lines that start with # are skipped",
        "FILE",
        API_KEY_FILE,
    ),
    Option(
        "max-requests-per-key",
        "security",
        int,
        "requests in hand for each key, or for all clients together without keys; 0: any number",
        "N",
    ),
    Option("tls-cert", "security", str, "PEM file with the server's certificate chain: TLS on both ports", "FILE"),
    Option("tls-key", "security", str, "PEM file with the certificate's private key, without a passphrase", "FILE"),
    Option(
        "tls-client-ca",
        "security",
        str,
        "PEM file of authorities; only clients with a certificate of theirs are let in",
        "FILE",
    ),
    Option(
        "drain-timeout",
        "operation",
        float,
        "how long running requests may take to finish once the cluster is asked to stop",
        "SECONDS",
        "drain_timeout_s",
    ),
    Option("log-level", "operation", str, "how much each process writes about itself", choices=LOG_LEVELS),
    Option("log-dir", "operation", str, "directory of the log files", "DIRECTORY", default="standard error"),
)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option's flag; cli.serve_config reads them."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    groups["operation"].add_argument(
        "--config", dest=CONFIG_FILE, metavar="FILE.yaml", help="a file with any of these options"
    )
    for option in OPTIONS:
        if option.type is bool:
            groups[option.group].add_argument(
                f"--{option.name}", dest=option.target, action="store_true", default=None, help=_help(option)
            )
            continue
        groups[option.group].add_argument(
            f"--{option.name}",
            dest=option.target,
            type=_finite if option.type is float else option.type,
            action="append" if option.is_list else "store",
            metavar=option.metavar or None,
            choices=option.choices or None,
            help=_help(option),
        )


def kind_of(value: Any) -> str:
    """What a value of a YAML file is, in a person's words."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _help(option: Option) -> str:
    default = option.default or {f.name: f.default for f in fields(ClusterConfig)}.get(option.target)
    if isinstance(default, float):
        default = f"{default:g}"
    # What an empty text or False means needs no word: the option is off.
    is_shown = default != "" and default is not False and isinstance(default, str | int)
    return (f"{option.help} (default: {default})" if is_shown else option.help).replace("%", "%%")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text}")
    return number
