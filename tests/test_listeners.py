"""docs/machines.md tells of everything that listens, and of what protects it."""

import re
from pathlib import Path

from tests import sizes

ROOT = Path(__file__).resolve().parents[1]
LISTENS = re.compile(
    r"\.bind\(|bind_to_random_port|create_server\(|start_server\(|start_unix_server\(|HTTPServer\)|\bTCPStore\(|"
    r"\buvicorn\.(run\(|Server\b)|init_process_group\("
)
WHERE = {
    "environments/gateway/process.py": "the gateway of the environment `agent`",
    "examples/agent/server.py": "`examples/agent/server.py`",
    "dashboard/__main__.py": "`python -m dashboard`",
    "serve/__main__.py": "`python -m serve`",
    "shared/http_limits.py": "`python -m serve`",
    "shared/launch/sockets.py": "messages and heartbeats",
    "shared/launch/ranks.py": "where several nodes meet",
    "shared/launch/addresses.py": "messages and heartbeats",
    "shared/launch/meeting_store.py": "the store of several nodes",
    "trainer/step/fsdp.py": "gloo, NCCL",
    "trainer/check/machine.py": "where several nodes meet",
}
"""file that listens -> its row of the table"""


def test_the_table_has_all_that_listens():
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for room in sizes.PRODUCT
        for path in (ROOT / room).rglob("*.py")
    }
    assert {name for name, text in texts.items() if LISTENS.search(text)} == WHERE.keys()
    machines = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    page = machines.partition("## Who can reach a launch")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    assert all(len(row) == 4 and all(row[:3]) for row in rows)
    for row in WHERE.values():
        assert any(cells[0].startswith(row) for cells in rows), row
