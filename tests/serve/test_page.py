"""Files of the chat page: what is sent, with which headers, from whom the libraries are. test_page_chat.py opens it."""

import hashlib
import json
import re
import subprocess
import sys
from itertools import product

import pytest

from examples.quickstart.prepare import Options
from examples.quickstart.word_problems import PHRASES
from serve.page import FILES, FOLDER

OWN = sorted(path for path in FOLDER.glob("*.*") if path.suffix in (".html", ".css", ".js", ".svg"))


def test_the_page_and_the_reference_are_sent_without_a_key_and_with_a_strict_policy(serve, monkeypatch):
    monkeypatch.setenv("MAESTRALE_API_KEY", "a-key-of-somebody-0123456789")
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
    assert served.client.get("/v1/models").status_code == 401


def test_files_are_sent_once_and_nothing_else_is(serve):
    served = serve("x")
    first = served.client.get("/page/page.js")
    assert first.status_code == 200 and first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = served.client.get("/page/page.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert served.client.head("/page/page.css").status_code == 200
    for name in ("nothing.js", "__init__.py", "../app.py", "%2e%2e/app.py", "bundle/build.js", ""):
        reply = served.client.get(f"/page/{name}")
        assert reply.status_code == 404 and reply.json()["error"]["message"], name


def test_the_libraries_are_those_that_are_named():
    """`make page` wrote what lies here, from the versions in package.json and its lock."""
    manifest = json.loads((FOLDER / "vendor/manifest.json").read_text())
    wanted = json.loads((FOLDER / "bundle/package.json").read_text())
    lock = json.loads((FOLDER / "bundle/package-lock.json").read_text())
    assert manifest["libraries"] == wanted["dependencies"]
    for name, version in {**wanted["dependencies"], **wanted["devDependencies"]}.items():
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
    assert not any("resolved" in package for package in lock["packages"].values()), "a lock names no host"
    files = {path.name: path for path in (FOLDER / "vendor").iterdir() if path.name != "manifest.json"}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert sums == manifest["files"]
    licences = files["LICENSES.txt"].read_text(encoding="utf-8")
    assert all(f"{name} {version}: " in licences for name, version in wanted["dependencies"].items())


def test_our_files_name_no_other_host_and_load_what_is_there():
    for path in OWN:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # never loaded
        assert not re.findall(r'(?:https?:|["(])//[\w-]+(?:\.[\w-]+)+', text), path
        for name in re.findall(r'["(]/page/([^")]+)', text) + re.findall(r'(?:from |url\()"(?:\./)?([\w./-]+)"', text):
            assert name in FILES, f"{path.name}: {name}"


@pytest.mark.slow
def test_an_installed_server_has_the_page(root, tmp_path):
    """setuptools puts all of the page into a wheel, and nothing of its build."""
    program = (
        "import sys; from setuptools import Distribution; d = Distribution({'script_name': ''});"
        "d.parse_config_files();"
        "b = d.get_command_obj('build_py'); b.build_lib = sys.argv[1]; b.ensure_finalized();"
        "print(*b.get_outputs(include_bytecode=0), sep='\\n')"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150, check=True).stdout
    built = {line.removeprefix(f"{tmp_path}/serve/page/") for line in output.splitlines()}
    assert FILES.keys() <= built and "__init__.py" in built
    assert not any("bundle" in name or "node_modules" in name for name in built)


def test_the_examples_are_word_problems_that_the_quickstart_knows():
    """Each with two changes."""
    examples = re.findall(r'\["(\w\w)", "([^"]+)"\]', (FOLDER / "examples.js").read_text(encoding="utf-8"))
    assert [code for code, _ in examples] == list(PHRASES) and 2 in range(*Options().operations)
    for code, example in examples:
        phrases, changes = PHRASES[code], PHRASES[code].gains + PHRASES[code].losses
        known = (
            phrases.space.join([thing.has, *both, thing.ask]).format(who=who, owner=owner, number="#", unit=thing.unit)
            for (who, owner), thing, *both in product(phrases.people, phrases.things, changes, changes)
        )
        assert re.sub(r"\d+", "#", example) in known, example
