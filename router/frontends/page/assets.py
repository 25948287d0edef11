"""The files of the live page and of the API's page: public, without data."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "files"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE, DOCS = "page.html", "docs.html"
PAGES = {PAGE: "/", DOCS: "/docs"}
PREFIX = "/page/"
FILES = tuple(sorted(path.name for path in _DIRECTORY.iterdir() if path.suffix in _MEDIA_TYPES))
# Swagger UI's build. The package holds it for FastAPI's own page, which is not used: it has a script in its markup.
LIBRARY_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
_LIBRARY = Path(str(files("fastapi_offline"))) / "static"
PAGE_PATHS = (*PAGES.values(), *(f"{PREFIX}{name}" for name in (*FILES, *LIBRARY_FILES) if name not in PAGES))
# Placeholder for the path prefix that a proxy strips.
_BASE = "<!-- base -->"


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def load_asset(name: str, root_path: str = "") -> Asset:
    """Args: root_path: path under which a proxy shows the server; the page's links use it."""
    path = (_LIBRARY if name in LIBRARY_FILES else _DIRECTORY) / name
    content = path.read_bytes()
    if name in PAGES:
        base = f'<base href="{root_path}/">' if root_path else ""
        content = content.replace(_BASE.encode(), base.encode())
    return Asset(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"')
