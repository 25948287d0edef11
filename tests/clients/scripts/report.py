"""Runs a script's checks, each despite earlier failures. Standard library only, for every client's environment."""

import argparse
import os
import traceback
from collections.abc import Callable


class Report:
    """Attributes: url: server URL, without /v1; model_dir: local files, including the tokenizer."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--url", required=True)
        parser.add_argument("--model", required=True)
        parser.add_argument("--model-dir", required=True)
        given = parser.parse_args()
        self.url: str = given.url
        self.model: str = given.model
        self.model_dir: str = given.model_dir
        self._num_failed = 0

    def check(self, what: str, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except Exception as error:
            self._num_failed += 1
            if os.environ.get("TANDEM_CLIENTS_TRACEBACK"):
                traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"failed  {what}: {reason[:400]}", flush=True)
        else:
            print(f"ok      {what}", flush=True)

    def end(self) -> None:
        raise SystemExit(1 if self._num_failed else 0)
