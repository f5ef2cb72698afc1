"""Files of the chat page: what is sent, with which headers, from whom the libraries are. test_page_chat.py opens it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.prepare import Options
from examples.quickstart.word_problems import PHRASES, Phrases, Thing
from serve.page import FILES, FOLDER
from tests.serve.conftest import Serve

OWN = sorted(path for path in FOLDER.glob("*.*") if path.suffix in (".html", ".css", ".js", ".svg"))
NAMESPACES = ("http://www.w3.org/2000/svg",)
"""names that look like addresses and are never loaded"""


def test_the_page_and_the_reference_are_sent_with_a_strict_policy(serve: Serve) -> None:
    served = serve("x")
    for path in ("/", "/docs"):
        reply = served.client.get(path)
        assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", reply.text), "nothing inline"


def test_files_are_sent_once(serve: Serve) -> None:
    served = serve("x")
    first = served.client.get("/page/page.js")
    assert first.status_code == 200 and first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = served.client.get("/page/page.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert served.client.head("/page/page.css").status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "../app.py", "%2e%2e/app.py", "bundle/build.js", ""])
def test_nothing_else_is_sent(serve: Serve, name: str) -> None:
    reply = serve("x").client.get(f"/page/{name}")
    assert reply.status_code == 404 and reply.json()["error"]["message"]


def test_the_page_needs_no_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAESTRALE_API_KEY", "a-key-of-somebody-0123456789")
    served = serve("x")
    assert served.client.get("/").status_code == served.client.get("/page/page.js").status_code == 200
    assert served.client.get("/v1/models").status_code == 401


def test_the_libraries_are_those_that_are_named() -> None:
    """`make page` wrote what lies here, from the versions in package.json and its lock."""
    manifest = json.loads((FOLDER / "vendor/manifest.json").read_text())
    wanted = json.loads((FOLDER / "bundle/package.json").read_text())
    lock = json.loads((FOLDER / "bundle/package-lock.json").read_text())
    assert manifest["libraries"] == wanted["dependencies"]
    for name, version in {**wanted["dependencies"], **wanted["devDependencies"]}.items():
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
    assert not any("resolved" in package for package in lock["packages"].values()), "a lock names no host"
    found = {path.name: path for path in (FOLDER / "vendor").iterdir() if path.name != "manifest.json"}
    assert found.keys() == manifest["files"].keys()
    for name, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest["files"][name], name
    licences = found["LICENSES.txt"].read_text(encoding="utf-8")
    assert all(f"{name} {version}: " in licences for name, version in wanted["dependencies"].items())


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_our_files_name_no_other_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in NAMESPACES:
        text = text.replace(name, "")
    assert not re.findall(r'(?:https?:|["(])//[\w-]+(?:\.[\w-]+)+', text)


def test_what_the_pages_load_is_there() -> None:
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'["(]/page/([^")]+)', text) + re.findall(r'(?:from |url\()"(?:\./)?([\w./-]+)"', text):
            assert name in FILES, f"{path.name}: {name}"


@pytest.mark.slow
def test_an_installed_server_has_the_page(root: Path, tmp_path: Path) -> None:
    """setuptools puts all of the page into a wheel, and nothing of its build."""
    program = (
        "import sys; from setuptools import Distribution; d = Distribution({'script_name': ''});"
        "d.parse_config_files();"
        "b = d.get_command_obj('build_py'); b.build_lib = sys.argv[1]; b.ensure_finalized();"
        "print(*b.get_outputs(include_bytecode=0), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True,
        timeout=150, check=True,
    )  # fmt: skip
    built = {line.removeprefix(f"{tmp_path}/serve/page/") for line in done.stdout.splitlines()}
    assert FILES.keys() <= built and "__init__.py" in built
    assert not any("bundle" in name or "node_modules" in name for name in built)


def test_the_examples_are_word_problems_that_the_quickstart_knows() -> None:
    text = (FOLDER / "examples.js").read_text(encoding="utf-8")
    examples = re.findall(r'\["(\w\w)", "([^"]+)"\]', text)
    assert [code for code, _ in examples] == list(PHRASES)
    fewest, most = Options().operations
    for code, example in examples:
        phrases = PHRASES[code]
        assert any(
            tells(phrases, thing, who, owner, operations).fullmatch(example)
            for who, owner in phrases.people for thing in phrases.things for operations in range(fewest, most + 1)
        ), example  # fmt: skip


def tells(phrases: Phrases, thing: Thing, who: str, owner: str, operations: int) -> re.Pattern[str]:
    """What a word problem of one owner and thing looks like."""
    change = "|".join(map(re.escape, phrases.gains + phrases.losses))
    sentences = [re.escape(thing.has), *[f"(?:{change})"] * operations, re.escape(thing.ask)]
    words = {"who": who, "owner": owner, "number": r"\d+", "unit": thing.unit}
    pattern = re.escape(phrases.space).join(sentences)
    return re.compile(re.sub(r"\\\{(\w+)\\\}", lambda found: words[found[1]], pattern))
