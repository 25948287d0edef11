"""Starts a prefill and a decode worker, holds a short conversation over gRPC, and shows timings and page transfers."""

import argparse
import functools
import sys
import threading

from rich.console import Console

from tandem.client import TandemClient, TandemError
from tandem.config import DEVICES
from tandem.deploy.cli.client_options import add_sampling_arguments
from tandem.deploy.cli.terminal import Conversation, print_timeline, sampling_params, stream_answer
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.launcher import Cluster
from tandem.deploy.serve import run_cluster
from tandem.engine.config import DTYPES
from tandem.v1 import inference_pb2 as pb

MODEL = "smollm2-135m-instruct"
QUESTIONS = ("What is the capital of France?", "And what is it famous for?")


def converse(arguments: argparse.Namespace, cluster: Cluster, stop: threading.Event) -> int:
    console = Console()
    conversation = Conversation()
    with TandemClient(cluster.addresses.grpc) as client:
        for question in QUESTIONS:
            if stop.is_set():
                return 1
            console.print(f"\n[bold]> {question}[/]", highlight=False)
            request = pb.GenerateRequest(sampling=sampling_params(arguments, max_tokens=64))
            request.chat.messages.extend(conversation.ask(question).messages)
            try:
                answer, last = stream_answer(client, request)
            except TandemError as error:
                print(f"demo: {error}", file=sys.stderr)
                return 1
            conversation.answered(answer)
            print_timeline(console, last)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Start a cluster, talk with it, show where the time went.")
    add_sampling_arguments(parser)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="cuda: a GPU for each worker (%(default)s)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="of weights and KV (%(default)s)")
    arguments = parser.parse_args()
    # Port 0 is any free port.
    config = ClusterConfig(model=MODEL, device=arguments.device, dtype=arguments.dtype, grpc_port=0, http_port=0)
    sys.exit(run_cluster(config, functools.partial(converse, arguments)))
