"""A tokenizer whose tokens are bytes."""

from dataclasses import dataclass


@dataclass
class Encoding:
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class ByteTokenizer:
    """Token i is byte i; 0 ends an output."""

    byte_level = True
    vocab_size = 256
    max_token_bytes = 4
    eos_token_ids = (0,)

    def tokenize(self, text: str, add_special_tokens: bool) -> "Encoding":
        return Encoding(list(text.encode()))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id else b""
