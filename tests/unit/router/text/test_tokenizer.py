import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers

from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import CHATML, byte_level, save

TALK = [{"role": "user", "content": "1 < 2 & 'é' 😀"}]
TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "  leading, trailing  and\tinner   spaces \n\n\n  end ",
    "It's 3.14159, 1,234,567 and 2024-05-06; x²=½ ٣٤ Ⅷ",
    "don't DON'T we'll I'd you've",
    'def f(x: int) -> str:\n    return f"{x!r}"  # comment\n\n\tif a<=b: pass',
    "naïve café Ångström ñandú straße",
    "東京は日本の首都です。 한국어 ไทย עברית العربية हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u00a0\u3000",
    "\x00\x01\x7f\r\n\ufeff\ufffd",
    "a" * 300,
]


WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def naive_bpe(ranks: Mapping[tuple[str, str], int], vocab: Mapping[str, int], text: str) -> list[int]:
    """SmolLM2's rule: split, then join the earliest-learnt pair until none is left."""
    byte_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(WORD, part):
            pieces = list("".join(piece for piece, _ in byte_of.pre_tokenize_str(word)))
            while len(pieces) > 1:
                pairs = list(pairwise(pieces))
                rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairs))
                if rank == len(ranks):
                    break
                pieces[at : at + 2] = ["".join(pairs[at])]
            ids += [vocab[piece] for piece in pieces]
    return ids


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer(smollm2_dir)


def test_smollm2_ids_are_those_of_naive_bpe(smollm2: Tokenizer, smollm2_dir: Path) -> None:
    content = json.loads(RawTokenizer.from_file(str(smollm2_dir / "tokenizer.json")).to_str())["model"]
    ranks = {(first, second): rank for rank, (first, second) in enumerate(content["merges"])}
    for text in TEXTS:
        expected = naive_bpe(ranks, content["vocab"], text)
        assert smollm2.encode(text) == expected
        assert smollm2.decode(expected) == text


def test_smollm2_agrees_with_transformers(smollm2: Tokenizer, smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    oracle: Any = AutoTokenizer.from_pretrained(smollm2_dir)
    for text in [*TEXTS, "<|im_start|>user\nhello<|im_end|>"]:
        assert smollm2.encode(text) == oracle.encode(text)
    talks = [
        TALK,
        [{"role": "system", "content": "Be brief."}, *TALK],
        [*TALK, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "<|im_end|>\n"}],
    ]
    for messages in talks:
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert smollm2.encode_chat(messages) == expected


def test_smollm2_settings(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.byte_level


def test_where_eos_comes_from(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), {"eos_token_id": None}, eos_token="</s>")
    assert Tokenizer(tmp_path).eos_token_ids == (257,)
    save(tmp_path, byte_level(), {"eos_token_id": 7}, eos_token="</s>")
    assert Tokenizer(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert Tokenizer(tmp_path).eos_token_ids == (3, 4)
    save(tmp_path, byte_level(), {"eos_token_id": None})
    (tmp_path / "generation_config.json").write_text("{}")
    assert Tokenizer(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("wrong", [-1, "</s>", 1.5])
def test_invalid_eos_is_refused(tmp_path: Path, file: str, wrong: object) -> None:
    save(tmp_path, byte_level())
    (tmp_path / file).write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [7, wrong]}))
    with pytest.raises(ValueError, match=f"{file}: eos_token_id {wrong!r} is not a token id"):
        Tokenizer(tmp_path)


def test_stored_truncation_is_ignored(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=9, pad_id=0, pad_token="!")
    assert len(Tokenizer(save(tmp_path, raw)).encode("hello")) == 5


def test_lone_surrogate_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=CHATML))
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud83d"}])


def test_incomplete_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)
    save(tmp_path, byte_level())
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        Tokenizer(tmp_path)
    save(tmp_path, byte_level(), {"vocab_size": None})
    with pytest.raises(ValueError, match="vocab_size must be a positive integer, got None"):
        Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer(tmp_path)


def test_import_loads_neither_torch_nor_transformers() -> None:
    script = "import sys, tandem.router.text.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
