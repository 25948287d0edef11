"""An ArgumentParser that suggests corrections."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from tandem import exit_codes

# Flags of vLLM, SGLang and Dynamo.
OTHERS_FLAGS = {
    "--tensor-parallel-size": "--tp",
    "--tp-size": "--tp",
    "--port": "--http-port and --grpc-port",
    "--max-num-seqs": "--max-batch-size",
    "--max-running-requests": "--max-batch-size",
    "--max-num-batched-tokens": "--chunk-size",
    "--chunked-prefill-size": "--chunk-size",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--block-size": "--page-size",
    "--num-gpu-blocks-override": "--num-pages",
    "--max-total-tokens": "--num-pages",
    "--context-length": "--max-model-len",
    "--model-path": "--model",
    "--tool-call-parser": "--tool-parser",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--schedule-policy": "--schedule",
    "--lora-modules": "--lora",
    "--lora-paths": "--lora",
    "--max-loras-per-batch": "--max-loras",
    "--num-prefill-workers": "--prefill",
    "--num-decode-workers": "--decode",
}
# Flags of `vllm bench serve`.
OTHERS_BENCH_FLAGS = {
    "--num-prompts": "--requests",
    "--request-rate": "--rate",
    "--max-concurrency": "--concurrency",
    "--base-url": "--endpoint",
    "--random-input-len": "--input-tokens",
    "--random-output-len": "--output-tokens",
    "--dataset-name": "--workload",
    "--dataset-path": "--trace",
    "--num-warmups": "--warmup",
    "--goodput": "--slo",
    "--result-filename": "--out",
}
UNSERVED_FLAGS = {
    "--pipeline-parallel-size": "GPUs share each layer of a model; --tp sets their number",
    "--data-parallel-size": "--both sets the number of workers that prefill and decode",
    "--dp": "--both sets the number of workers that prefill and decode",
    "--enable-auto-tool-choice": "tools need no option; --tool-parser selects the parser",
    "--enable-prefix-caching": "prefixes are always cached",
    "--enable-chunked-prefill": "long prompts are always computed in chunks; --chunk-size sets their size",
    "--trust-remote-code": "code of a model is never run",
    "--enable-lora": "--lora, or --lora-root, turns adapters on",
}
# By letters alone, "cpu" would be the nearest.
OTHERS_VALUES = {"gpu": "cuda"}
# Of a usage above an error, which must stay in sight.
MAX_USAGE_LINES = 2
_UNKNOWN_FLAGS = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_INVALID_CHOICE = re.compile(r"(?:argument [^:]+: )?invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class SuggestingParser(argparse.ArgumentParser):
    """Suggests the nearest flag, command or value for an unknown one, in subcommands too."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and not any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            # argparse would report it from the parent parser, which does not know the subcommand's flags.
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        usage = self.format_usage()
        if usage.count("\n") > MAX_USAGE_LINES:
            usage = f"usage: see {self.prog} --help\n"
        self.exit(exit_codes.USAGE, f"{usage}{self.prog}: error: {message}{self._suggestion(message)}\n")

    def _suggestion(self, message: str) -> str:
        if unknown := _UNKNOWN_FLAGS.fullmatch(message):
            typed, known = unknown.group(1).split()[0].partition("=")[0], list(self._option_string_actions)
            if typed in UNSERVED_FLAGS:
                return f" ({UNSERVED_FLAGS[typed]})"
            for others in (OTHERS_FLAGS, OTHERS_BENCH_FLAGS):
                if typed in others and others[typed].split()[0] in known:
                    return f" (here that is {others[typed]})"
            if not typed.startswith("-") and "--model" in known:
                return f" (did you mean --model {typed}?)"
        elif invalid := _INVALID_CHOICE.fullmatch(message):
            typed, known = invalid.group(1), re.findall(r"[^\s,']+", invalid.group(2))
            typed = OTHERS_VALUES.get(typed, typed)
        else:
            return ""
        nearest = difflib.get_close_matches(typed, known, n=1)
        return f" (did you mean {nearest[0]}?)" if nearest else ""
