"""Tokenization: ids, chat templates and text that appears as its tokens do."""

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from router.tokenization import IncrementalDetokenizer
from router.tokenization import Tokenizer as ModelTokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TALK = [{"role": "user", "content": "1 < 2 & 'é' 😀"}]


def save(directory: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, **more: Any) -> Path:
    """A model directory around ``tokenizer``; ``more`` goes to tokenizer_config.json."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    defaults = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 64, "eos_token_id": 7}
    (directory / "config.json").write_text(json.dumps(defaults | (config or {})))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **more}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level(bos: bool = False) -> Tokenizer:
    """Every byte is a token; two special tokens, and two added ones that are text."""
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("two words")])
    if bos:
        single = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        tokenizer.post_processor = single
    return tokenizer


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


def naive_bpe(tokenizer: Tokenizer, text: str) -> list[int]:
    """SmolLM2's rule in the plainest words: split, then join the earliest-learnt pair until none is left."""
    content = json.loads(tokenizer.to_str())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(content["merges"])}
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
            ids += [content["vocab"][piece] for piece in pieces]
    return ids


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> ModelTokenizer:
    return ModelTokenizer(smollm2_dir)


def test_smollm2_ids_are_those_of_naive_bpe(smollm2: ModelTokenizer, smollm2_dir: Path) -> None:
    raw = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    for text in TEXTS:
        expected = naive_bpe(raw, text)
        assert smollm2.encode(text) == expected
        assert smollm2.decode(expected) == text


def test_smollm2_agrees_with_transformers(smollm2: ModelTokenizer, smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(smollm2_dir)
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


def test_smollm2_settings(smollm2: ModelTokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.max_model_len) == (49152, 8192)
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.byte_level


TEMPLATES = {
    "chatml": CHATML,
    "whitespace control": "{% for m in messages %}\n  {% if 1 %}\n{{ m.role }}\n{% endif %}\n{% endfor %}",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "loop control": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}",
    "special tokens": "{{ bos_token }}[{{ eos_token }}]{{ tools }}{{ pad_token is none }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in [1] %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}",
    "today": "{{ strftime_now('%Y-%m-%d') }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    eos = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False}
    save(tmp_path, byte_level(), eos_token=eos, chat_template=template)
    messages = [*TALK, {"role": "assistant", "content": "two words"}]
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ModelTokenizer(tmp_path).encode_chat(messages) == expected


def test_a_template_that_writes_bos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save(tmp_path, byte_level(bos=True), chat_template="{{ bos_token }}hi"))
    assert tokenizer.encode("hi")[0] == 256
    assert tokenizer.encode_chat(TALK) == tokenizer.encode("hi")


def test_where_a_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tokenizer = ModelTokenizer(save(tmp_path, byte_level(), chat_template=named))
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == "plain"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    tokenizer = ModelTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == "from the file"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: send a plain prompt"),
        ([{"name": "rag", "template": "x"}], "has no chat template"),
        ("{% if %}", "template is malformed"),
        ("{{ raise_exception('roles must alternate') }}", "rejects the messages: roles must alternate"),
        ("{{ messages[0].name + 'x' }}", "rejects the messages"),
        ("{{ 1 // 0 }}", "rejects the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects the messages"),
        ("{{ messages.append(1) }}", "rejects the messages"),
    ],
)
def test_template_refusals(tmp_path: Path, template: Any, message: str) -> None:
    tokenizer = ModelTokenizer(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(TALK)


def test_the_clock_of_templates_is_this_machines(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save(tmp_path, byte_level(), chat_template="{{ strftime_now('%Y') }}"))
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == str(datetime.now().year)


def test_where_eos_comes_from(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), {"eos_token_id": None}, eos_token="</s>")
    assert ModelTokenizer(tmp_path).eos_token_ids == (257,)
    save(tmp_path, byte_level(), {"eos_token_id": 7}, eos_token="</s>")
    assert ModelTokenizer(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelTokenizer(tmp_path).eos_token_ids == (3, 4)
    save(tmp_path, byte_level(), {"eos_token_id": None})
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelTokenizer(tmp_path).eos_token_ids == ()


def test_limits_stored_with_the_tokenizer_do_not_cut_prompts(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=9, pad_id=0, pad_token="!")
    assert len(ModelTokenizer(save(tmp_path, raw)).encode("hello")) == 5


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save(tmp_path, byte_level(), chat_template=CHATML))
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud83d"}])


def test_incomplete_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        ModelTokenizer(tmp_path)
    save(tmp_path, byte_level())
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        ModelTokenizer(tmp_path)
    save(tmp_path, byte_level(), {"vocab_size": None})
    with pytest.raises(ValueError, match="vocab_size must be a positive integer, got None"):
        ModelTokenizer(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        ModelTokenizer(tmp_path)


def sentencepiece() -> Tokenizer:
    """Pieces with a space mark, byte tokens for all other characters, and the byte-level alphabet."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "▁▁", "▁a", "▁the", "a", "é", "\ufffd", "\n", "##ing", "end</w>", ".", "日本"]
    letters = [letter for letter in ALPHABET if letter not in {"é", "a", "."}]
    tokens = ["<s>", "</s>", *bytes_, *words, *letters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "▁"), ("▁", "a")], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


DECODERS = {
    "sentencepiece": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "byte fallback": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "word pieces": decoders.WordPiece(),
    "word ends": decoders.BPEDecoder("</w>"),
    "bytes in a sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "none": None,
}


@pytest.fixture(scope="module", params=["smollm2", "bytes", *DECODERS])
def any_tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2: ModelTokenizer
) -> ModelTokenizer:
    """One tokenizer of every kind."""
    if request.param == "smollm2":
        return smollm2
    raw = byte_level() if request.param == "bytes" else sentencepiece()
    if request.param != "bytes":
        raw.decoder = DECODERS[request.param]
    config = {"vocab_size": raw.get_vocab_size() + 3}  # some ids are no tokens
    return ModelTokenizer(save(tmp_path_factory.mktemp("model"), raw, config))


def stream(tokenizer: ModelTokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """The pieces of text for ``ids`` pushed in chunks of the sizes ``cuts``, over and over."""
    detokenizer, pieces, at, turn = IncrementalDetokenizer(tokenizer), [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        pieces.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.flush()]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_pieces_make_the_whole(any_tokenizer: ModelTokenizer, data: st.DataObject) -> None:
    whole_range = st.integers(0, any_tokenizer.vocab_size - 1)
    few = data.draw(st.lists(whole_range, min_size=1, max_size=6), label="few")  # runs and repeats
    ids = data.draw(st.lists(whole_range | st.sampled_from(few), max_size=60), label="ids")
    cuts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5), label="cuts")
    assert "".join(stream(any_tokenizer, ids, cuts)) == any_tokenizer.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
@settings(max_examples=50, deadline=None)
def test_a_character_is_whole_or_not_there_yet(any_tokenizer: ModelTokenizer, text: str) -> None:
    pieces = stream(any_tokenizer, ids := any_tokenizer.encode(text), [1])
    if "\ufffd" not in any_tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


def test_characters_come_with_their_last_byte(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save(tmp_path, byte_level()))
    ids = tokenizer.encode("a€😀")
    assert stream(tokenizer, ids, [1]) == ["a", "", "", "€", "", "", "", "😀", ""]
    assert stream(tokenizer, ids[:-1], [1])[-1] == "\ufffd"
    assert stream(tokenizer, [256, *ids[:2], 257, *ids[2:4], 258, 259], [1])[4:] == [
        "",
        "€",
        "<think>",
        "two words",
        "",
    ]


def test_after_a_flush_a_new_text_begins(any_tokenizer: ModelTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(any_tokenizer)
    for ids in ([300, 5, 40, 200], [200, 300], []):
        assert detokenizer.push(ids) + detokenizer.flush() == any_tokenizer.decode(ids)


def test_work_per_token_does_not_grow(any_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, decode = [0], ModelTokenizer.decode

    def counting(self: ModelTokenizer, ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(ModelTokenizer, "decode", counting)
    start = 270 if any_tokenizer.vocab_size > 300 else 100
    ids = [start + index % 40 for index in range(1000)]
    pieces = stream(any_tokenizer, ids, [1])
    assert max(lengths) < 10
    assert sum(map(len, pieces)) > 500


def test_importing_it_brings_neither_torch_nor_transformers() -> None:
    script = "import sys, router.tokenization; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
