"""The `tandem` command."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields

from tandem import __version__
from tandem.cluster_config import ClusterConfig
from tandem.config import DEVICES, DTYPES, EVICTION_POLICIES, PREFILL_POLICIES, ROUTING_POLICIES, TRANSPORTS

EXIT_FAILED = 1
EXIT_USAGE = 2
_DEFAULTS = {f.name: f.default for f in fields(ClusterConfig)}


class _DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status: 0, 1 if it failed, 2 if it was called wrongly."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except UnicodeEncodeError:
        print("tandem: an argument is not valid UTF-8", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Serve large language models with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    generate = commands.add_parser("generate", help="complete one prompt", description="Complete one prompt.")
    generate.add_argument("prompt", help="the prompt, or - to read it from standard input")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    _add_client_arguments(generate)
    generate.set_defaults(run=_generate)
    chat = commands.add_parser("chat", help="talk with the model", description="Talk with the model.")
    chat.add_argument("--system", default="", help="a system message to begin with")
    _add_client_arguments(chat)
    chat.set_defaults(run=_chat)
    status = commands.add_parser("status", help="show workers and pages", description="Show workers and pages.")
    status.add_argument("--address", default="127.0.0.1:50051", help="the router's gRPC address (%(default)s)")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="start a cluster on this host",
        description="Start a cluster on this host and keep it until Ctrl-C.",
        formatter_class=_DefaultsFormatter,
    )
    add = serve.add_argument
    add("--model", required=True, help="directory, hub id, GGUF file, or smollm2-135m-instruct")
    add("--load-format", choices=("auto", "dummy"), help="dummy: random weights for a directory's config")
    add("--prefill", dest="num_prefill", type=int, metavar="N", help="prefill workers (default: 1, or 0 with --both)")
    add("--decode", dest="num_decode", type=int, metavar="N", help="decode workers (default: 1, or 0 with --both)")
    add("--both", dest="num_both", type=int, metavar="N", help="workers that prefill and decode")
    add("--device", choices=DEVICES, help="where the workers compute")
    add("--dtype", choices=DTYPES, help="of weights and KV")
    add("--page-size", type=int, metavar="N", help="tokens in a page")
    add("--num-pages", type=int, metavar="N", help="pages in each worker's pool")
    add("--max-model-len", type=int, metavar="N", help="prompt and output tokens; 0: as many as model and pool allow")
    add("--chunk-size", type=int, metavar="N", help="prompt tokens in one prefill forward")
    add("--max-batch-size", type=int, metavar="N", help="requests in one decode step")
    add("--schedule", choices=PREFILL_POLICIES, help="which prompt is computed next")
    add("--eviction", choices=EVICTION_POLICIES, help="which cached page goes first")
    add("--routing", choices=ROUTING_POLICIES, help="which workers serve a request")
    add("--transport", choices=("auto", *TRANSPORTS), help="how KV pages travel between workers")
    add("--threads", dest="num_threads", type=int, metavar="N", help="CPU threads of each worker; 0: cores / workers")
    add("--host", help="address to listen on")
    add("--grpc-port", type=int, metavar="PORT", help="the clients' gRPC port; 0 picks a free one")
    serve.set_defaults(**{k: v for k, v in _DEFAULTS.items() if k not in ("model", "num_prefill", "num_decode")})
    serve.set_defaults(run=_serve)


def _add_client_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="127.0.0.1:50051", help="the router's gRPC address (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=_positive, metavar="N", help="output tokens at most (the server's default)"
    )
    add_sampling_arguments(parser)
    parser.add_argument("--timings", action="store_true", help="print the request's timeline after the answer")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How answers are sampled; tandem.terminal.sampling_params reads it."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the most likely token (%(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that make up P (all)")
    add("--seed", type=_seed, metavar="N", help="the same seed gives the same answer (default: another each time)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 2**64:
        raise argparse.ArgumentTypeError("must have at most 64 bits and no sign")
    return seed


def _serve(arguments: argparse.Namespace) -> int:
    from deploy.serve import serve

    values = {name: getattr(arguments, name) for name in _DEFAULTS}
    for name in ("num_prefill", "num_decode"):
        if values[name] is None:
            values[name] = 0 if values["num_both"] else 1
    try:
        config = ClusterConfig(**values)
    except ValueError as error:
        print(f"tandem serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    return serve(config)


def _generate(arguments: argparse.Namespace) -> int:
    from tandem.terminal import Conversation, print_answer

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.raw:
        return print_answer(arguments, text=prompt)
    return print_answer(arguments, conversation=Conversation().ask(prompt))


def _chat(arguments: argparse.Namespace) -> int:
    from tandem.terminal import chat

    return chat(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from google.protobuf.json_format import MessageToDict

    from tandem.client import TandemClient, TandemError
    from tandem.terminal import print_status

    try:
        with TandemClient(arguments.address) as client:
            info = client.server_info()
    except TandemError as error:
        print(f"tandem status: {error}", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps(MessageToDict(info, preserving_proto_field_name=True), indent=2))
    else:
        print_status(info)
    return 0 if info.ready else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
