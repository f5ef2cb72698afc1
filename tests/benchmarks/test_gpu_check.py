"""The check of one card: it runs to its end without one, its trainer part needs torch and a few packages only, and one
item's failure, hang or lack of memory costs that item alone. Its code runs here on the CPU with tiny sizes."""

import inspect
import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import place, speed
from lab.plan.scenario import MODELS

TORCH = ("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2",
         "markupsafe", "fsspec", "filelock")  # fmt: skip
"""torch and what its wheel requires"""
LACKING = ("msgspec", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "zmq", "pyzmq.libs",
           "safetensors", "psutil")  # fmt: skip
"""what `make gpu-wheels` fetches"""


def check(*arguments: str, python: str = sys.executable, **environment: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-m", "benchmarks.gpu_check", *arguments], cwd=gpu_check.ROOT, text=True, check=False, timeout=300,
        capture_output=True, env={**kept, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_without_a_card_it_runs_to_its_end_and_says_what_was_skipped_and_why(tmp_path):
    code, output = check("--out", str(tmp_path / "found.json"), CUDA_VISIBLE_DEVICES="")
    assert code == 0, output
    results = json.loads((tmp_path / "found.json").read_text())
    assert [row["name"] for row in results["items"]] == [item.name for item in gpu_check.ITEMS]
    for row in results["items"]:
        assert row["status"] == "skipped" and "sees no NVIDIA card" in row["reason"]
        assert f"{row['part']} part, {row['name']}: " in output and row["reason"] in output
    assert f"0 passed, 0 failed, {len(gpu_check.ITEMS)} skipped" in output


def bare_interpreter(folder: Path) -> str:
    """An interpreter with torch and nothing else that the trainer imports."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    installed = Path(torch.__file__).parents[1]
    for name in TORCH:
        (site / name).symlink_to(installed / name)
    (site / "torch.dist-info").symlink_to(next(installed.glob("torch-*.dist-info")))
    return str(folder / "bin" / "python")


@pytest.mark.soak  # in make test: its refusals, below
@pytest.mark.slow
def test_the_trainer_part_needs_torch_and_a_folder_of_packages_only(tmp_path):
    """Run for real: another interpreter, without vLLM, numpy and all that .venv has."""
    python = bare_interpreter(tmp_path / "bare")
    import msgspec

    wheels = tmp_path / "wheels" / f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels.mkdir(parents=True)
    for name in LACKING:
        if (source := Path(msgspec.__file__).parents[1] / name).exists():
            (wheels / name).symlink_to(source)
    some = ("--part", "trainer", "--device", "cpu", "--tiny", "--only", "gradients", "transfer")
    code, output = check(*some, python=python, GPU_WHEELS=str(tmp_path / "nothing"))
    assert code == 1 and "No module named 'msgspec'" in output and "make gpu-wheels" in output
    code, output = check(
        *some, "--out", str(tmp_path / "found.json"), python=python, GPU_WHEELS=str(tmp_path / "wheels")
    )
    assert code == 0 and "2 passed, 0 failed" in output, output


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [item.name for item in gpu_check.ITEMS if item.name != "trl"])
def test_every_item_runs_on_a_cpu(name):
    """Several minutes: so that no code runs for the first time on a card."""
    code, output = check("--device", "cpu", "--tiny", "--only", name)
    assert code == 0 and "1 passed, 0 failed" in output, output


def row_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, deadline_s: float = 20.0) -> dict[str, Any]:
    """Run one item whose process does `code` instead."""
    fake = tmp_path / "benchmarks" / "gpu_check"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (fake / "__main__.py").write_text(code)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    return gpu_check.run(gpu_check.ITEMS[0]._replace(deadline_s=deadline_s), "cpu", True, {}, 600.0)


FIGURE = {"name": "speed", "value": 1.5, "unit": "GB/s", "of": "", "met": None, "target": None, "better": "",
          "not_measured": ""}  # fmt: skip
TELL = f"print({json.dumps(FIGURE)!r}, flush=True)\n"


def test_an_item_that_dies_keeps_what_it_had_measured(monkeypatch, tmp_path):
    row = row_of(monkeypatch, tmp_path, TELL + "raise MemoryError('CUDA out of memory')")
    assert row["status"] == "failed" and "CUDA out of memory" in row["reason"] and row["figures"] == [FIGURE]


def test_an_item_that_hangs_is_ended_with_all_it_started(monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    hang = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    hang += f"open({str(pid)!r}, 'w').write(str(child.pid))\nchild.wait()"
    row = row_of(monkeypatch, tmp_path, TELL + hang, deadline_s=3.0)
    assert row["status"] == "failed" and row["reason"] == "not done within 3 s" and row["figures"] == [FIGURE]
    with suppress(ProcessLookupError):  # it has ended, and init has waited for it
        assert select.select([os.pidfd_open(int(pid.read_text()))], [], [], 10)[0], "its child lives"


def test_a_figure_beyond_its_limit_fails_the_item(monkeypatch, tmp_path):
    missed = {**FIGURE, "met": False, "target": 2.0, "better": "higher"}
    row = row_of(monkeypatch, tmp_path, f"print({json.dumps(missed)!r})")
    assert row["status"] == "failed" and row["reason"] == "missed: speed"
    assert gpu_check.shown(missed) == "1.5 GB/s (>= 2, **missed**)"


@pytest.mark.parametrize(("item", "machine", "device", "why"), [
    ("peaks", {"why": "No module named 'torch'"}, "cuda", "has no torch that works: No module named 'torch'"),
    ("peaks", {"torch": "2.10.1+cu128", "card": "NVIDIA H100"}, "cuda", "is older than 2.11"),
    ("peaks", {"torch": "2.11.0", "card": "NVIDIA H100"}, "cuda", ""),
    ("peaks", {"torch": "2.13.0+cpu", "card": ""}, "cpu", ""),
    ("learning", {"torch": "2.13.0+cpu", "card": ""}, "cuda", "torch 2.13.0+cpu sees no NVIDIA card"),
])  # fmt: skip
def test_an_item_that_does_not_fit_says_why(item, machine, device, why):
    reason = gpu_check.unfit(next(each for each in gpu_check.ITEMS if each.name == item), machine, device)
    assert why in reason and bool(reason) == bool(why)


def test_the_page_is_what_the_results_files_say(tmp_path):
    page, folder = tmp_path / "gpu.md", tmp_path / "results"
    folder.mkdir()
    page.write_text(gpu_check.PAGE.read_text())
    gpu_check.write_page(gpu_check.RESULTS, page)
    assert page.read_text() == gpu_check.PAGE.read_text(), "python -m benchmarks.gpu_check --page"
    gpu_check.write_page(folder, page)
    assert gpu_check.NOT_RUN in page.read_text()
    items = [{"name": "peaks", "status": "passed", "reason": "", "figures": [FIGURE]},
             {"name": "trl", "status": "skipped", "reason": "TRL is not installed", "figures": []}]  # fmt: skip
    found = {"card": "NVIDIA H100 80GB HBM3", "date": "2026-11-25", "commit": "abc", "machine": "16 cores of x86_64",
             "versions": {"torch": "2.13.0", "cuda": "12.8", "nccl": ""}, "items": items}  # fmt: skip
    (folder / "h100.json").write_text(json.dumps(found))
    gpu_check.write_page(folder, page)
    text = page.read_text()
    assert gpu_check.NOT_RUN not in text and "### NVIDIA H100 80GB HBM3" in text
    assert "| peaks | speed | 1.5 GB/s |  |" in text and "**skipped** | TRL is not installed" in text


def test_attention_without_grouped_heads_reads_repeated_keys(monkeypatch):
    """torch 2.11 on a card; the attention of later ones is left alone."""
    from torch.nn.attention import varlen

    usual = varlen.varlen_attn
    place.group_heads()
    assert varlen.varlen_attn is usual or "enable_gqa" not in inspect.signature(usual).parameters

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *offsets: Any, window_size: Any) -> Any:
        return key, value

    monkeypatch.setattr(varlen, "varlen_attn", plain)
    place.group_heads()
    query, key, value = torch.zeros(3, 4, 2), torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    found = varlen.varlen_attn(query, key, value, 0, enable_gqa=True, window_size=())
    for own, read in zip((key, value), found, strict=True):
        assert read.shape == query.shape and all(torch.equal(read[:, head], own[:, head // 2]) for head in range(4))


def test_as_many_layers_as_fit():
    config = MODELS["8b"]
    layers = speed.fitting_layers(config, 80e9)
    assert 1 < layers < config.layers and speed.fitting_layers(config, 1e13) == config.layers
    assert speed.fitting_layers(config, 1e9) == 1 < layers < speed.fitting_layers(config, 141e9)
