from pathlib import Path

import pytest

from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import DECODERS, byte_level, save, sentencepiece


@pytest.fixture(scope="session", params=["smollm2", "bytes", *DECODERS])
def any_tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path
) -> Tokenizer:
    if request.param == "smollm2":
        return Tokenizer(smollm2_dir)
    raw = byte_level() if request.param == "bytes" else sentencepiece()
    if request.param != "bytes":
        raw.decoder = DECODERS[request.param]
    config = {"vocab_size": raw.get_vocab_size() + 3}  # some ids are unused
    return Tokenizer(save(tmp_path_factory.mktemp("model"), raw, config))
