from collections.abc import Sequence
from dataclasses import dataclass

from tandem.router.text.chat_format import ChatFormat


@dataclass
class Encoding:
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class ByteTokenizer:
    """Token i is byte i; token 0 ends an output."""

    byte_level = True
    vocab_size = 256
    max_token_bytes = 4
    eos_token_ids = (0,)
    chat_format = ChatFormat()

    def tokenize(self, text: str, add_special_tokens: bool) -> "Encoding":
        return Encoding(list(text.encode()))

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(message["content"] for message in messages)

    def takes_role(self, role: str) -> bool:
        return False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def decode_prompt(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.decode(token_ids)

    def spelling(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_piece(self, token_id: int) -> bytes:
        return bytes((token_id,))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id else b""
