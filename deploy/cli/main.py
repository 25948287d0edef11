"""The `tandem` command."""

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tandem import __version__, exit_codes
from tandem.deploy.cli.adapters import add_adapters_command
from tandem.deploy.cli.bench_options import COMPARISONS, add_bench_options, add_comparison_options
from tandem.deploy.cli.bench_options import EPILOG as BENCH_EPILOG
from tandem.deploy.cli.client_options import DEFAULT_ADDRESS, add_answer_arguments, add_connection_arguments
from tandem.deploy.cli.cluster_commands import add_cluster_commands, add_cluster_name
from tandem.deploy.cli.estimate_options import EPILOG as ESTIMATE_EPILOG
from tandem.deploy.cli.estimate_options import add_estimate_options
from tandem.deploy.cli.parser import SuggestingParser
from tandem.deploy.cli.serve_options import API_KEY_VARIABLE, EPILOG, add_serve_options

if TYPE_CHECKING:
    from tandem.client import TandemClient
    from tandem.deploy.config.cluster_config import ClusterConfig

ClusterCommand = Callable[[argparse.Namespace, "ClusterConfig"], int]

# A server's install has all of these (extra `serve`), a client's none.
SERVER_PACKAGES = ("yaml", "ray", "torch")
EXAMPLES = """\
examples:
  tandem serve --model smollm2-135m-instruct
  tandem chat
  tandem COMMAND --help
"""
GENERATE_EXAMPLES = """\
examples:
  tandem generate "What is the capital of France?" --timings
  tandem generate --raw --max-tokens 20 "The old lighthouse stood"
  tandem generate - <question.txt --address server:50051 --tls-ca ca.pem
"""
CHAT_EXAMPLES = """\
examples:
  tandem chat --system "You answer in one sentence."
  tandem chat --temperature 0.7 --top-p 0.95
"""
COMPILE_EXAMPLES = """\
Takes the options of `tandem serve` and ignores those that no kernel depends on. Weights are random: the model's
directory needs only its config.json. docs/gpu.md has a recipe for container images.

examples:
  tandem compile --model org/name --device cuda
  tandem compile --config cluster.yaml
"""
CACHE_EXAMPLES = """\
Removed models are converted again when needed. $TANDEM_CACHE sets the directory (default: $XDG_CACHE_HOME/tandem,
else ~/.cache/tandem). Models in use by a running cluster stay.

examples:
  tandem cache
  tandem cache clear
"""
SERVE_DETACHED = "return when the cluster is ready and keep it running without this terminal"
STATUS_EXAMPLES = """\
The exit status is 0 if the cluster can serve a request now, else 1.

examples:
  tandem status
  tandem status chat
  tandem status --json --address server:50051
"""


TRACE_EXAMPLES = """\
Recording costs time only while it runs. docs/tracing.md explains tracks and slices.

examples:
  tandem trace
  tandem trace --seconds 30 --out burst.json --address server:50051
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(_joined(sys.argv[1:] if argv is None else argv))
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        # Ctrl-C during imports.
        return exit_codes.SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        # The reader has left, as `head` does. The interpreter's own flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.SIGNALLED + signal.SIGPIPE
    except UnicodeEncodeError:
        print("tandem: an argument is not valid UTF-8", file=sys.stderr)
        return exit_codes.USAGE


def _joined(argv: Sequence[str]) -> list[str]:
    """Joins a command of two words into one argument.

    With real subcommands, argparse would take the value of a mistyped flag for one of them.
    """
    if len(argv) > 1 and argv[0] == "bench" and argv[1] in COMPARISONS:
        return [f"bench {argv[1]}", *argv[2:]]
    return list(argv)


def _parser() -> argparse.ArgumentParser:
    parser = SuggestingParser(
        prog="tandem",
        description="Serve large language models with prefill and decode on separate workers, and query them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def add(name: str, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # An abbreviated key in a file is an error too.
            allow_abbrev=False,
        )

    serve = add(
        "serve", "start a cluster on this host", "Start a cluster on this host and run it until Ctrl-C.", EPILOG
    )
    add_serve_options(serve)
    serve.add_argument("--detach", action="store_true", help=SERVE_DETACHED)
    serve.set_defaults(run=_run_configured, name=serve.prog, command=_serve)
    compile_ahead = add(
        "compile",
        "compile GPU kernels ahead of time",
        "Compile all kernels of a cluster on a GPU of the same kind, so that its workers start without compiling.",
        COMPILE_EXAMPLES,
    )
    add_serve_options(compile_ahead)
    compile_ahead.set_defaults(run=_run_configured, name=compile_ahead.prog, command=_compile, detach=False)
    generate = add("generate", "complete one prompt", "Send one prompt and stream its answer.", GENERATE_EXAMPLES)
    generate.add_argument("prompt", help="the prompt, or - to read it from standard input")
    generate.add_argument("--raw", action="store_true", help="continue the text without the chat template")
    add_answer_arguments(generate)
    add_connection_arguments(generate, _generate)
    chat = add(
        "chat",
        "talk with the model",
        "Talk with the model. Each request carries the whole conversation.",
        CHAT_EXAMPLES,
    )
    chat.add_argument("--system", default="", metavar="TEXT", help="system message")
    add_answer_arguments(chat)
    add_connection_arguments(chat, _chat)
    cache = add(
        "cache",
        "list or clear converted models",
        "List the models converted from GGUF files, print their directory, or remove those not in use.",
        CACHE_EXAMPLES,
    )
    cache.add_argument("action", nargs="?", choices=("list", "clear", "path"), default="list", help="(default: list)")
    cache.set_defaults(run=_cache, name=cache.prog)
    estimate = add(
        "estimate",
        "estimate the GPUs that a load needs",
        "Estimate the time of a model's work on a kind of GPU, and the number and roles of GPUs that a load needs.",
        ESTIMATE_EPILOG,
    )
    add_estimate_options(estimate)
    estimate.set_defaults(run=_estimate, name=estimate.prog)
    bench = add(
        "bench",
        "measure a server",
        "Send requests to a cluster or any OpenAI-compatible server, and report latencies and throughput.",
        BENCH_EPILOG,
    )
    add_bench_options(bench, os.environ.get(API_KEY_VARIABLE, ""))
    bench.set_defaults(run=_bench, name=bench.prog)
    for name, (summary, default, metavar) in COMPARISONS.items():
        comparison = add(f"bench {name}", summary, f"{summary.capitalize()}.", "")
        add_comparison_options(comparison, default, metavar)
        comparison.set_defaults(run=_compare, name=comparison.prog, comparison=name)
    status = add("status", "show workers and pages", "Show a cluster's workers, requests and pages.", STATUS_EXAMPLES)
    add_cluster_name(status, "a cluster on this host (default: the one at --address)", default="")
    status.add_argument("--json", action="store_true", help="print JSON")
    add_connection_arguments(status, _status)
    add_adapters_command(add)
    add_cluster_commands(add)
    trace = add(
        "trace",
        "record a trace of a cluster",
        "Record all workers and routers for some seconds, as a trace for https://ui.perfetto.dev.",
        TRACE_EXAMPLES,
    )
    trace.add_argument(
        "--seconds", type=_trace_seconds, default=10.0, metavar="N", help="at most 60 (default: %(default)g)"
    )
    trace.add_argument("--out", default="trace.json", metavar="FILE", help="(default: %(default)s)")
    add_connection_arguments(trace, _trace)
    return parser


def _trace_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 60:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 60")
    return seconds


def _run_configured(arguments: argparse.Namespace) -> int:
    if missing := [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]:
        print(
            f"{arguments.name}: this install is a client's, without {', '.join(missing)}: "
            "pip install 'tandem-llm[serve]'",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    from tandem.deploy.cli.serve_config import cluster_config

    try:
        config = cluster_config(arguments, os.environ)
    except ValueError as error:
        print(f"{arguments.name}: {error}", file=sys.stderr)
        return exit_codes.USAGE
    command: ClusterCommand = arguments.command
    return command(arguments, config)


def _serve(arguments: argparse.Namespace, config: "ClusterConfig") -> int:
    print(f"tandem {__version__}: starting with the model {config.model}", flush=True)
    from tandem.deploy.serve import serve

    return serve(config, detach=arguments.detach)


def _compile(arguments: argparse.Namespace, config: "ClusterConfig") -> int:
    from tandem.deploy.compile import compile_kernels

    return compile_kernels(config)


def _generate(arguments: argparse.Namespace, client: "TandemClient") -> int:
    from tandem.deploy.cli.terminal import Conversation, print_answer

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        print(f"{arguments.name}: the prompt is empty", file=sys.stderr)
        return exit_codes.FAILED
    if arguments.raw:
        return print_answer(arguments, client, text=prompt)
    return print_answer(arguments, client, conversation=Conversation().ask(prompt))


def _chat(arguments: argparse.Namespace, client: "TandemClient") -> int:
    from tandem.deploy.cli.terminal import chat

    return chat(arguments, client)


def _cache(arguments: argparse.Namespace) -> int:
    from tandem.deploy.cli.cache import run_cache

    return run_cache(arguments.action)


def _estimate(arguments: argparse.Namespace) -> int:
    from tandem.deploy.cli.estimate_command import run_estimate

    return run_estimate(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from tandem.deploy.cli.bench_command import run_bench

    return run_bench(arguments, DEFAULT_ADDRESS)


def _compare(arguments: argparse.Namespace) -> int:
    from tandem.deploy.cli.bench_command import run_comparison

    return run_comparison(arguments)


def _trace(arguments: argparse.Namespace, client: "TandemClient") -> int:
    from tandem.deploy.cli.trace import run_trace

    return run_trace(arguments, client)


def _status(arguments: argparse.Namespace, client: "TandemClient") -> int:
    from google.protobuf.json_format import MessageToDict

    from tandem.client import TandemError
    from tandem.deploy.cli.status_tables import print_status
    from tandem.deploy.cli.terminal import print_failure

    try:
        info = client.server_info()
    except TandemError as error:
        return print_failure(arguments, error)
    if arguments.json:
        print(json.dumps(MessageToDict(info, preserving_proto_field_name=True), indent=2))
    else:
        print_status(info)
    return 0 if info.ready else exit_codes.FAILED


if __name__ == "__main__":
    sys.exit(main())
