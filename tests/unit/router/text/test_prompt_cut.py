"""Truncation of prompts and inputs, which share it."""

from pathlib import Path

import pytest
from tokenizers import processors

from tandem.router.text.prompt_cut import MAX_TOKENS_OF_CUTS, PIECE_CHARACTERS, PromptCut, surely_beyond
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import byte_level, save

BOS, EOS = 256, 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token per byte, with one before and one after each text."""
    return _bytes(tmp_path_factory.mktemp("model"))


def _bytes(directory: Path) -> Tokenizer:
    found = byte_level()
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return Tokenizer(save(directory, found))


@pytest.mark.parametrize(("num_tokens", "kept"), [(1, [BOS]), (2, [BOS, EOS]), (3, [BOS, ord("c"), EOS])])
def test_a_cut_is_never_longer_than_asked(tokenizer: Tokenizer, num_tokens: int, kept: list[int]) -> None:
    cut = PromptCut(num_tokens, keeps_end=True)
    ids = [tokenizer.tokenize("c", False).ids[0] if one == ord("c") else one for one in kept]
    assert cut.tokens(tokenizer, "abc", add_special_tokens=True) == ids


def test_a_text_surely_beyond_the_limit_is_read_up_to_it(tokenizer: Tokenizer) -> None:
    assert surely_beyond(tokenizer, "x" * 1000, 999) == 0
    assert surely_beyond(tokenizer, "x" * 10 * PIECE_CHARACTERS, 1000) == PIECE_CHARACTERS - MAX_TOKENS_OF_CUTS
