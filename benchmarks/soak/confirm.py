"""Confirms outputs by transformers' logits, in a process of its own.

Batches and restarted attempts round logits differently. Where a choice hangs on the rounding, several outputs are
right. So an output is confirmed if each of its tokens is possible behind the tokens in front of it (`possible_tokens`).
A text is confirmed if any possible tokens spell it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import questions
from benchmarks.soak.case import Case
from benchmarks.soak.possible_tokens import possible_tokens
from tandem.engine.grammars import Grammars
from tandem.engine.randomness import uniform
from tandem.engine.sampler import process_logits
from tandem.engine.token_sequence import TokenSequence
from tandem.router.text.grammar_check import translate
from tandem.sampling_params import SamplingParams

_COMPILE_S = 30.0
# Forward passes for one output.
_MAX_FORWARDS = 600
# Decoding writes it for the first bytes of a character.
_INCOMPLETE = "\ufffd"


def run(pipe: Connection, model_dir: str) -> None:
    """Answer each Case by "" or the reason why its output is wrong."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    judge = Judge(Path(model_dir))
    for case in questions(pipe):
        pipe.send(judge.objection(case))


@dataclass
class _Path:
    """A beginning of an output. Attributes: cache: KV of all its tokens but the last; None: not kept."""

    output: tuple[int, ...]
    cache: Any = None


class Judge:
    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        eos = self._model.generation_config.eos_token_id
        self._eos_token_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        grammars = Grammars.of_model(model_dir, self._model.config.vocab_size)
        assert grammars is not None
        self._grammars = grammars

    def objection(self, case: Case) -> str:
        """Return "" if the output is possible, else the first token that is not."""
        asked = _Asked(case, self._prompt(case), self._sampling(case), self._grammar(case))
        with torch.inference_mode():
            if not isinstance(case.output, str):
                return self._objection_to_tokens(asked, case.output)
            # Mostly the model writes a text in the tokenizer's own tokens.
            if not self._objection_to_tokens(asked, self.encode(case.output)):
                return ""
            return self._objection_to_text(asked, case.output)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits behind each token: (len(token_ids), vocab_size)."""
        rows: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return rows

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _objection_to_tokens(self, asked: "_Asked", output: Sequence[int]) -> str:
        rows = self.logits([*asked.prompt, *output])[len(asked.prompt) - 1 :]
        for index, token_id in enumerate(output):
            possible = self._possible(asked, output[:index], rows[index])
            if token_id not in possible:
                return f"output token {index} is {token_id}, and transformers has {_some(possible)}"
        return self._objection_to_end(asked, output, rows[len(output)])

    def _objection_to_text(self, asked: "_Asked", text: str) -> str:
        """Follow the possible outputs that spell the text, the most likely first."""
        waiting = [_Path(())]
        deepest, objection = -1, "no possible output is this text"
        for _ in range(_MAX_FORWARDS):
            if not waiting:
                return objection
            path = waiting.pop()
            row = self._extend(asked, path)
            written = self.decode(path.output)
            if self._is_spelt(asked, text, written):
                end = self._objection_to_end(asked, path.output, row)
                if not end:
                    return ""
                deepest, objection = max((deepest, objection), (len(path.output), end))
            if asked.is_over(path.output):
                continue
            possible = self._possible(asked, path.output, row)
            fitting = [i for i in possible if self._fits(asked, text, self.decode((*path.output, i)))]
            if not fitting and len(path.output) > deepest:
                deepest = len(path.output)
                objection = f"behind {written!r} transformers has {self._texts(possible)}"
            waiting += [_Path((*path.output, i)) for i in reversed(fitting)]
            if fitting:
                waiting[-1].cache = path.cache
        return f"not confirmed by {_MAX_FORWARDS} forward passes"

    def _is_spelt(self, asked: "_Asked", text: str, written: str) -> bool:
        return written == text if asked.case.is_whole else written.startswith(text)

    def _fits(self, asked: "_Asked", text: str, written: str) -> bool:
        """Return whether an output that begins so may spell the text."""
        return text.startswith(written.rstrip(_INCOMPLETE)) or self._is_spelt(asked, text, written)

    def _extend(self, asked: "_Asked", path: _Path) -> torch.Tensor:
        """Return the logits behind a path: (vocab_size,). Its cache then has all its tokens."""
        new = path.output[-1:] if path.cache is not None else (*asked.prompt, *path.output)
        answer = self._model(torch.tensor([new]), past_key_values=path.cache, use_cache=True)
        path.cache = answer.past_key_values
        row: torch.Tensor = answer.logits[0, -1]
        return row

    def _possible(self, asked: "_Asked", output: Sequence[int], row: torch.Tensor) -> list[int]:
        """Return the possible next tokens, the most likely first."""
        sequence = TokenSequence([*asked.prompt, *output], len(asked.prompt), [], sampling=asked.sampling)
        if asked.grammar:
            row = row.masked_fill(~self._allowed(asked, output), -torch.inf)
        row = process_logits(row[None], [sequence])[0]
        found = possible_tokens(row, asked.sampling, uniform(asked.sampling.seed, sequence.length)).nonzero()[:, 0]
        ids: list[int] = found[row[found].argsort(descending=True)].tolist()
        return ids

    def _allowed(self, asked: "_Asked", output: Sequence[int]) -> torch.Tensor:
        constraint = self._grammars.constraint(asked.grammar)
        constraint.compiled_matcher.result(_COMPILE_S)
        constraint.follow(list(output), 0)
        masks = self._grammars.masks([(constraint, asked.sampling.stop_token_ids)])
        bits = torch.from_numpy(masks).view(torch.uint8)[0, :, None] >> torch.arange(8, dtype=torch.uint8)
        return (bits & 1).flatten()[: self._model.config.vocab_size].bool()

    def _objection_to_end(self, asked: "_Asked", output: Sequence[int], row: torch.Tensor) -> str:
        """Args: row: logits behind the output."""
        if any(i in asked.sampling.stop_token_ids for i in output[:-1]):
            return "the output goes on behind its end"
        if not asked.case.is_whole or asked.is_over(output):
            is_cut = bool(output) and output[-1] not in asked.sampling.stop_token_ids
            wanted = asked.case.finish_reason
            if asked.case.is_whole and wanted and is_cut != (wanted == "length"):
                return f"the finish reason cannot be {wanted!r}"
            return ""
        # An output need not have its end token.
        possible = self._possible(asked, output, row)
        if asked.case.finish_reason != "length" and any(i in asked.sampling.stop_token_ids for i in possible):
            return ""
        return f"the output ends at token {len(output)}, and transformers has {_some(possible)}"

    def _prompt(self, case: Case) -> list[int]:
        if not isinstance(case.prompt, str):
            return list(case.prompt)
        if not case.is_chat:
            return self.encode(case.prompt)
        messages = [{"role": "user", "content": case.prompt}]
        return self.encode(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _sampling(self, case: Case) -> SamplingParams:
        known = dict(case.sampling)
        stop_token_ids = () if known.pop("ignore_eos", False) else self._eos_token_ids
        return SamplingParams(stop_token_ids=stop_token_ids, **known)

    def _grammar(self, case: Case) -> str:
        return translate(*case.structure) if case.structure else ""

    def _texts(self, token_ids: Sequence[int]) -> str:
        return _some([self._tokenizer.decode([i]) for i in token_ids])


@dataclass(frozen=True)
class _Asked:
    case: Case
    prompt: list[int]
    sampling: SamplingParams
    grammar: str

    def is_over(self, output: Sequence[int]) -> bool:
        """Return whether nothing may follow."""
        return len(output) >= self.sampling.max_tokens or any(i in self.sampling.stop_token_ids for i in output[-1:])


def _some(things: Sequence[Any]) -> str:
    return ", ".join(map(repr, things[:5])) + (f" and {len(things) - 5} more" if len(things) > 5 else "")
