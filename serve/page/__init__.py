"""The chat page at `/` and the API reference at `/docs`, served entirely from files in this folder.

Libraries are in vendor/, written by `make page` from the npm packages that bundle/package.json names. The browser is
instructed to load nothing from other servers and to run no inline scripts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from serve.errors import ApiError

FOLDER = Path(__file__).parent
KINDS = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", ".woff2": "font/woff2", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip
"""suffixes of the files that are served -> their content type"""
NOTHING_ELSE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
)
POLICIES = {
    # only DOMPurify may turn text into elements
    "index.html": NOTHING_ELSE + "img-src 'self'; require-trusted-types-for 'script'; trusted-types dompurify",
    "docs.html": NOTHING_ELSE + "img-src 'self' data:",
}
"""page -> its Content-Security-Policy"""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # keep it, and ask whether it has changed
}

router = APIRouter(include_in_schema=False)


class File(NamedTuple):
    """A file to be served: its contents, content type and ETag."""

    body: bytes
    kind: str
    etag: str


def load_files(*folders: Path) -> dict[str, File]:
    """Load all files of some folders that can be served, by their path from the first; requests for any other fail."""
    files = {}
    for path in (path for folder in folders for path in folder.iterdir() if path.suffix in KINDS):
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        files[path.relative_to(folders[0]).as_posix()] = File(body, KINDS[path.suffix], etag)
    return files


FILES = load_files(FOLDER, FOLDER / "vendor")


def send(name: str, request: Request, files: dict[str, File] = FILES) -> Response:
    """Return a file, or status 304 if the browser has it already. Raises ApiError if there is no such file."""
    file = files.get(name)
    if file is None:
        raise ApiError(404, f"there is no file {name[:100]} here", code="not_found")
    policy = POLICIES.get(name, NOTHING_ELSE)
    headers = {**HEADERS, "ETag": file.etag, "Content-Security-Policy": policy}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


@router.api_route("/", methods=["GET", "HEAD"])
def chat_page(request: Request) -> Response:
    """Return the chat page."""
    return send("index.html", request)


@router.api_route("/docs", methods=["GET", "HEAD"])
def reference(request: Request) -> Response:
    """Return the API reference, shown by Swagger UI."""
    return send("docs.html", request)


@router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
def page_file(name: str, request: Request) -> Response:
    """Return a file that the pages load."""
    return send(name, request)
