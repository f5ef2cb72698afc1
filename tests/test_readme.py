"""README.md: its size, its table, and what it tells of other files; the files for clusters."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.commands import check
from tests.sizes import PRODUCT

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
MACHINES = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
CLUSTERS = ROOT / "examples" / "clusters"
KUBERNETES = {
    (one["kind"], one["metadata"]["name"]): one
    for one in yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8"))
}


def test_the_table_of_wishes_stands_below_the_first_screen():
    lines = PAGE.splitlines()
    wishes = lines.index("## I want to ...")
    assert wishes > lines.index("## Two commands") > 15
    end = lines.index("## Serve and evaluate")
    rows = [line for line in lines[wishes:end] if line.startswith("| ") and not line.startswith("| ...")]
    assert len(rows) > 12 and all(re.search(r"\]\([^)]+\)|`make |`(python|maestrale) ", row) for row in rows)


def test_the_page_is_short():
    assert len(PAGE.encode()) <= 12 << 10, "move what is not for the first five minutes into docs/"


def test_the_image_gets_every_room():
    """A launch imports what lacks there: README's `docker build` would give an image that cannot start."""
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert not {*PRODUCT, "configs"} - {*copied}


def test_the_loop_is_as_short_as_it_is_said_to_be():
    [told] = re.findall(r"\[(\d+) lines\]\(examples/loop.py\)", PAGE)
    assert int(told) == len((ROOT / "examples" / "loop.py").read_text(encoding="utf-8").splitlines()) < 80


def by_readme(node: int) -> list[str]:
    """The arguments that docs/machines.md gives python on a node of four."""
    [line] = re.findall(r"python (-m trainer my_run.toml .*--nnodes=4 .*?)\n```", MACHINES.replace("\\\n", " "))
    words = line.replace("my_run.toml", "mine.toml").replace("NODE0", "node-a").split()
    return [word.replace("--node-rank=0", f"--node-rank={node}") for word in words]


def stand_in(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def started(script: list[str], folder: Path, **variables: object) -> list[str]:
    """What a script gives python, in a folder where that only prints its arguments."""
    for place in (".venv/bin", "bin"):
        stand_in(folder / place / "python", 'printf "%s\\n" "$@"')
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    given = {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        script, cwd=folder, env={"PATH": path, **given}, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split("\n")[:-1]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    """The one container of a pod."""
    [found] = pod["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("node", range(4))
def test_slurm_starts_what_the_page_says(node, tmp_path):
    stand_in(tmp_path / "bin/scontrol", '[ "$3" = "node-[a-d]" ] && printf "node-a\\nnode-b\\nnode-c\\nnode-d\\n"')
    stand_in(tmp_path / "bin/srun", 'shift; exec "$@"')
    words = started(
        ["bash", str(CLUSTERS / "slurm.sbatch"), "mine.toml"], tmp_path, SLURM_SUBMIT_DIR=tmp_path, SLURM_NNODES=4,
        SLURM_JOB_NODELIST="node-[a-d]", SLURM_NODEID=node,
    )  # fmt: skip
    assert words == by_readme(node)


@pytest.mark.parametrize("node", range(4))
def test_skypilot_starts_what_the_page_says(node, tmp_path):
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text(encoding="utf-8"))
    words = started(
        ["bash", "-c", task["run"]], tmp_path, SETTINGS="mine.toml", SKYPILOT_NUM_NODES=task["num_nodes"],
        SKYPILOT_NODE_RANK=node, SKYPILOT_NODE_IPS="node-a\nnode-b\nnode-c\nnode-d",
    )  # fmt: skip
    assert words == by_readme(node)
    assert (ROOT / task["envs"]["SETTINGS"]).is_file()


@pytest.mark.parametrize("node", range(4))
def test_kubernetes_starts_what_the_page_says(node, tmp_path):
    job = KUBERNETES["Job", "maestrale"]["spec"]
    assert job["completions"] == job["parallelism"] == 4 and job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    words = started(container(pod)["command"], tmp_path, SETTINGS="mine.toml", JOB_COMPLETION_INDEX=node)
    master = f"maestrale-0.{pod['subdomain']}"  # Kubernetes calls the pod of an index JOB-INDEX
    assert words == [word.replace("node-a", master) for word in by_readme(node)]
    names = KUBERNETES["Service", pod["subdomain"]]["spec"]
    assert names["clusterIP"] == "None" and names["publishNotReadyAddresses"]
    assert (ROOT / next(one["value"] for one in container(pod)["env"] if one["name"] == "SETTINGS")).is_file()


def test_kubernetes_serves_as_the_image_does():
    server = container(KUBERNETES["Deployment", "maestrale-serve"]["spec"]["template"]["spec"])
    docker = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    check(server["command"])
    assert json.dumps(server["command"]) in docker
    [(interval, timeout, begin, port, path)] = re.findall(
        r"--interval=(\d+)s --timeout=(\d+)s --start-period=(\d+)s .*?http://127.0.0.1:(\d+)(/\w+)", docker, re.DOTALL
    )
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = server[name]
        asked = (probe["periodSeconds"], probe["timeoutSeconds"], probe["httpGet"]["port"], probe["httpGet"]["path"])
        assert [*map(str, asked)] == [interval, timeout, port, path], name
    start = server["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] == int(begin)
    [served] = KUBERNETES["Service", "maestrale-serve"]["spec"]["ports"]
    assert served["targetPort"] == server["ports"][0]["containerPort"] == int(port)


def test_the_parts_of_the_kubernetes_file_name_each_other():
    docker = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    pods = {name: one["spec"]["template"] for (_, name), one in KUBERNETES.items() if "template" in one["spec"]}
    assert pods.keys() == {name for kind, name in KUBERNETES if kind == "Service"} and len(pods) == 2
    for name, pod in pods.items():
        assert KUBERNETES["Service", name]["spec"]["selector"] == pod["metadata"]["labels"] == {"app": name}
        runs, shared_memory = pod["spec"]["volumes"]
        assert ("PersistentVolumeClaim", runs["persistentVolumeClaim"]["claimName"]) in KUBERNETES
        mounts = {mount["name"]: mount["mountPath"] for mount in container(pod["spec"])["volumeMounts"]}
        assert mounts == {runs["name"]: "/app/runs", shared_memory["name"]: "/dev/shm"}
        assert f"docker build -t {container(pod['spec'])['image']} " in docker
    assert KUBERNETES["Deployment", "maestrale-serve"]["spec"]["selector"]["matchLabels"] == {"app": "maestrale-serve"}


@pytest.mark.parametrize("file", ["slurm.sbatch", "skypilot.yaml", "kubernetes.yaml"])
def test_files_that_were_not_run_say_so(file):
    assert "Not run" in (CLUSTERS / file).read_text(encoding="utf-8")
