"""Measures the cost of grammars: decode steps on a GPU, masks on the host.

Weights and prompts are random. The tokenizer is trained on the installed Python files, up to the model's vocabulary
size. A step's cost is (time for 129 output tokens - time for 1) / 128, all requests at once, prompts of 256 tokens.
Each request has its own JSON schema.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import llguidance
import tokenizers
from llguidance import LLMatcher

from benchmarks.engine_loop import Loop, add_engine_arguments, build_loop, open_model
from benchmarks.rows import Row, report
from tandem.engine.grammars import Grammars
from tandem.router.text.grammar_check import WHITESPACE

PROMPT_LEN = 256
NUM_STEPS = 128
BATCHES = (1, 64, 256)
NUM_RUNS = 3
TRAINING_BYTES = 60_000_000


def grammar(number: int) -> str:
    """Return the grammar of a list that outlasts the output."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 100 + number},
            "email": {"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{1,20}\\.(com|org)$"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": person, "minItems": 1000}
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def train_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_texts(), trainer)
    return trained


def _texts() -> Iterator[str]:
    num_bytes = 0
    packages = Path(llguidance.__file__).parent.parent
    for path in sorted(packages.rglob("*.py")):
        text = path.read_text(errors="ignore")
        num_bytes += len(text)
        yield text
        if num_bytes > TRAINING_BYTES:
            return


def mask_rows(model_dir: Path, vocab_size: int) -> Iterator[Row]:
    grammars = Grammars.of_model(model_dir, vocab_size)
    assert grammars is not None
    for count in BATCHES:
        began = time.perf_counter()
        constraints = [grammars.constraint(grammar(number)) for number in range(count)]
        while not all(constraint.is_ready for constraint in constraints):
            time.sleep(1e-4)
        yield Row(f"compiling {count} grammars", 1e3 * (time.perf_counter() - began), "ms")
        times = []
        outputs: list[list[int]] = [[] for _ in constraints]
        for _ in range(50):
            began = time.perf_counter()
            for constraint, output in zip(constraints, outputs, strict=True):
                constraint.follow(output, 0)
            masks = grammars.masks([(constraint, (0,)) for constraint in constraints])
            times.append(time.perf_counter() - began)
            for row, output in enumerate(outputs):
                output.append(int((masks[row].view("uint8") != 0).argmax() * 8))
                allowed = masks[row].view("uint8")[output[-1] // 8]
                output[-1] += (int(allowed) & -int(allowed)).bit_length() - 1
        yield Row(f"masks of {count} rows, median", 1e3 * statistics.median(times), "ms")
        yield Row("  longest", 1e3 * max(times), "ms")
    grammars.close()


def step_rows(loop: Loop) -> Iterator[Row]:
    for size in BATCHES:
        for name, count in (("none", 0), ("one", 1), ("all", size)):
            if name == "all" and size == 1:
                continue
            grammars = [grammar(number) for number in range(count)]
            loop.run([(PROMPT_LEN, 4)] * size, grammars)
            steps = []
            for _ in range(NUM_RUNS):
                once_s = loop.run([(PROMPT_LEN, 1)] * size, grammars)
                many_s = loop.run([(PROMPT_LEN, NUM_STEPS + 1)] * size, grammars)
                steps.append((many_s - once_s) / NUM_STEPS)
            yield Row(f"decode step, batch {size}, {name} with a grammar", 1e3 * statistics.median(steps), "ms")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args(argv)
    model = open_model(parser, Path(arguments.model))
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(Path(arguments.model) / "config.json", directory)
        tokenizer = train_tokenizer(model.vocab_size)
        tokenizer.save(f"{directory}/tokenizer.json")
        (Path(directory) / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
        name = Path(arguments.model).name
        arguments.model = directory
        rows = [Row("tokens", tokenizer.get_vocab_size(), ""), *mask_rows(Path(directory), model.vocab_size)]
        num_tokens = max(BATCHES) * (PROMPT_LEN + NUM_STEPS + 32)
        rows += step_rows(build_loop(arguments, num_tokens, max(BATCHES), lambda doing: None))
    return report(rows, f"Grammars: {name}", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
