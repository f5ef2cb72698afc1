"""Replies of hostile servers over real sockets: packed, endless, slow. Judges, agents' servers, evaluated endpoints and
teachers are all asked through `ApiEndpoint`."""

import ast
import asyncio
import gzip
import itertools
import re
import tracemalloc
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import httpx
import pytest

from shared.chat_endpoint import FAILURES, MAX_REPLY_BYTES, ApiEndpoint, HttpStatus
from tests import sizes

ROOT = Path(__file__).resolve().parents[2]
BLOCK = b"a" * (1 << 16)
CHUNK = b"10000\r\n" + BLOCK + b"\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


async def ask(reply: Iterable[bytes], deadline_s: float = 30.0, pause_s: float = 0.0) -> tuple[bytes, str]:
    """What the client is given by a server that answers so, and the Accept-Encoding that it sent."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        asked.append(head.partition("accept-encoding: ")[2].partition("\r\n")[0])
        try:
            for data in reply:
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(pause_s)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        endpoint = ApiEndpoint(url, "m", {}, deadline_s)
        try:
            return await endpoint.request("POST", url, {}), asked[0]
        finally:
            await endpoint.close()


@cache
def load_modules() -> None:
    """Make an ordinary request and one that fails, so that what a client imports then is not taken for its memory."""
    for coding in (b"", b"Content-Encoding: identity\r\n"):
        reply = OK + coding + b"Content-Length: 2\r\n\r\n{}"
        assert asyncio.run(ask([reply])) == (b"{}", "identity"), "and nothing else is asked for"
    with pytest.raises(FAILURES):
        asyncio.run(ask([OK + b"Content-Length: 2\r\n\r\n"], deadline_s=0.2, pause_s=1.0))


def attack(*reply: bytes, endless: bytes | None = None, deadline_s: float = 30.0, pause_s: float = 0.0) -> Exception:
    """The failure that a reply ends in, whose last part may come without end; its memory is bounded."""
    load_modules()
    tracemalloc.start()
    try:
        with pytest.raises(FAILURES) as failed:
            more = [] if endless is None else itertools.repeat(endless)
            asyncio.run(ask(itertools.chain(reply, more), deadline_s, pause_s))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * MAX_REPLY_BYTES, f"{peak >> 20} MiB"
    return failed.value


@cache
def bomb(layers: int) -> bytes:
    """64 MiB, or more, in some layers of gzip."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = b"".join(packer.compress(BLOCK) for _ in range(1024 * layers)) + packer.flush()
    return gzip.compress(data) if layers == 2 else data


@pytest.mark.parametrize("status", [200, 302, 500])
@pytest.mark.parametrize("coding", [
    "gzip", "gzip, gzip", "GZIP", "x-gzip", "deflate", "br", "zstd", "identity, gzip", "gzip\r\nX: y",
])  # fmt: skip
def test_a_packed_reply_is_never_unpacked(coding, status):
    data = zlib.compress(BLOCK * 1024) if coding == "deflate" else bomb(2 if coding.count("gzip") == 2 else 1)
    head = f"HTTP/1.1 {status} X\r\nContent-Encoding: {coding}\r\nContent-Length: {len(data)}\r\n\r\n"
    error = attack(head.encode(), data)
    assert "Content-Encoding" in str(error) and isinstance(error, HttpStatus) == (status != 200)


@pytest.mark.parametrize("status", [b"200", b"307", b"401", b"503"])
def test_a_reply_without_end_is_cut(status):
    head = b"HTTP/1.1 %s X\r\n" % status
    for begin, block in ((b"\r\n", BLOCK), (b"Transfer-Encoding: chunked\r\n\r\n", CHUNK)):
        assert f"more than {MAX_REPLY_BYTES} bytes" in str(attack(head + begin, endless=block))


@pytest.mark.parametrize(
    ("begin", "block"),
    [
        (OK + b"X: ", BLOCK), (OK, b"X: " + BLOCK + b"\r\n"), (OK, b"a: b\r\n" * 1000), (b"HTTP/1.1 200 ", BLOCK),
        (CHUNKED + b"0\r\n", b"a: b\r\n" * 1000), (CHUNKED + b"0\r\nX: ", BLOCK), (CHUNKED + b"1;a=", BLOCK),
        (b"", BLOCK),
    ],
    ids=["header", "headers", "small headers", "status", "trailers", "trailer", "chunk extension", "no HTTP"],
)  # fmt: skip
def test_headers_without_end_are_cut(begin, block):
    assert isinstance(attack(begin, endless=block), httpx.RemoteProtocolError)


@pytest.mark.parametrize(("begin", "drop"), [
    (OK + b"\r\n", b"a"), (CHUNKED, b"1\r\na\r\n"), (OK + b"X: ", b"a"), (CHUNKED + b"0\r\n", b"a: b\r\n"),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50), (b"", b"HTTP/1.1 103 X\r\nLink: a\r\n\r\n"), (b"", b""),
], ids=["body", "chunks", "header", "trailers", "100", "103", "nothing"])  # fmt: skip
def test_the_deadline_is_one_of_the_whole_reply(begin, drop):
    error = attack(begin, endless=drop, deadline_s=0.3, pause_s=0.01)
    assert isinstance(error, httpx.TimeoutException) and "0.3 s" in str(error)


CLIENTS = re.compile(
    r"httpx2?\.(get|post|put|request|stream|Client|AsyncClient)|urllib\.request\..*|(.*\.)?(urlopen|OpenAI|AsyncOpenAI)|"
    r"(aiohttp|http\.client)\..*|requests\.(get|post|request|Session)"
)


def test_nobody_reads_replies_in_another_way():
    """Whoever does needs the same bounds. `httpx.stream` is the download of benchmarks, which reads raw bytes too."""
    allowed = {
        ("shared/chat_endpoint.py", "httpx.AsyncClient"),
        ("environments/mcp_http.py", "httpx2.AsyncClient"),
        ("evaluation/download.py", "httpx.stream"),
        ("curate/programs.py", "requests.get"),  # of a dictionary
    }
    made = set()
    for path in (path for room in sizes.PRODUCT if room != "examples" for path in (ROOT / room).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if CLIENTS.search(text) or "iter_" in text else "")):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if CLIENTS.fullmatch(name):
                made.add((str(path.relative_to(ROOT)), name))
            assert not re.search(r"\.a?iter_(bytes|lines|text)$", name), f"{path}: {name} unpacks"
    assert made == allowed
