import json
from pathlib import Path
from typing import Any

import pytest

from tandem.router.text.generation_config import FILE, SamplingDefaults, read_sampling_defaults


def written(directory: Path, content: Any) -> Path:
    (directory / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_request_fields_are_read(tmp_path: Path) -> None:
    content = {
        "eos_token_id": [1, 2],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "transformers_version": "4.51.0",
    }
    plain = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    defaults = read_sampling_defaults(written(tmp_path, content))
    assert defaults == SamplingDefaults(plain, 2048)
    assert str(defaults) == "temperature 0.6, top_p 0.9, top_k 20, repetition_penalty 1.05, max_tokens 2048"


def test_missing_or_empty_file(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    assert read_sampling_defaults(written(tmp_path, {"eos_token_id": 2})) == SamplingDefaults()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ([], "not a JSON object"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": -1}, "temperature must be a number of at least 0, not -1"),
        ({"top_k": 0.5}, "top_k must be a number, not 0.5"),
        ({"top_p": True}, "top_p must be a number, not True"),
        ({"max_new_tokens": 0}, "max_tokens must be between 1 and"),
    ],
)
def test_invalid_values_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match="set generation_config to none to ignore it") as refused:
        read_sampling_defaults(written(tmp_path, content))
    assert str(refused.value).startswith(f"{tmp_path / FILE}: {message}")
