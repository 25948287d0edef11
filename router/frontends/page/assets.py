"""The page's files: small, public, without data."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "files"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "page.html"
PREFIX = "/page/"
FILES = tuple(sorted(path.name for path in _DIRECTORY.iterdir() if path.suffix in _MEDIA_TYPES))
PAGE_PATHS = ("/", *(f"{PREFIX}{name}" for name in FILES if name != PAGE))
# Placeholder for the path prefix that a proxy strips.
_BASE = "<!-- base -->"


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def load_asset(name: str, root_path: str = "") -> Asset:
    """Args: root_path: path under which a proxy shows the server; the page's links use it."""
    path = _DIRECTORY / name
    content = path.read_bytes()
    if name == PAGE:
        base = f'<base href="{root_path}/">' if root_path else ""
        content = content.replace(_BASE.encode(), base.encode())
    return Asset(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"')
