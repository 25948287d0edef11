"""A tokenizer whose tokens are bytes."""


class ByteTokenizer:
    """Token i is byte i; 0 ends an output."""

    byte_level = True
    vocab_size = 256
    max_token_bytes = 4
    eos_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id else b""
