"""Adapters beside a served model: names, prompts, mistakes, newer versions; with a scripted engine, and with vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch

from serve.adapters import read_adapter
from shared.errors import ConfigError, ModelError
from shared.model import hf, lora
from shared.model.adapter_folder import save_adapter
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder
from shared.model.model_card import CARD
from tests.serve.conftest import Serve, eventually

SAID = "<think>Two and three.</think>5"


def write_adapter(folder: Path, model: Path | None = None, rank: int = 4, seed: int = 1, prompt: str = "") -> Path:
    """An adapter of a model's folder, with a card; without a model, of one layer of no model."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"model.layers.0.self_attn.q_proj": (8, 8)}
    if model is not None:
        decoder = Decoder(DecoderConfig.from_hf(hf.load_config(model)))
        lora.attach(decoder, rank, 8.0)
        sizes = {name: tuple(layer.weight.shape) for name, layer in lora.adapters(decoder)}  # type: ignore[misc]
    matrices = {}
    for name, (outputs, inputs) in sizes.items():
        matrices[name + lora.A] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        matrices[name + lora.B] = torch.randn(outputs, rank, generator=generator) * 2
    save_adapter(folder, matrices, rank, 8.0, str(model))
    card = {"run": folder.name, "version": 3, "system_prompt": prompt, "checkpoint": ""}
    (folder / CARD).write_text(json.dumps(card))
    return folder


def test_each_name_gets_its_adapter_and_its_system_prompt(serve: Serve, tmp_path: Path) -> None:
    poems, sums = write_adapter(tmp_path / "a", prompt="Write poems."), write_adapter(tmp_path / "b", prompt="Add up.")
    served = serve(SAID, name="base", system_prompt="trained", adapter=[f"poems={poems}", f"sums={sums}"])
    for model, prompt in (("poems", "Write poems."), ("sums", "Add up."), ("base", ""), ("", "")):
        reply = served.ask("How many?", model=model).json()
        assert reply["model"] == (model or "base")
        assert served.engine.samplings[-1].adapter == ("" if model in ("", "base") else model)
        assert (prompt in served.engine.prompts[-1]) and ("poems" in served.engine.prompts[-1]) == (model == "poems")
    raw = served.client.post("/v1/completions", json={"prompt": "2 + 3 =", "model": "sums"})
    assert raw.json()["model"] == "sums" and served.engine.samplings[-1].adapter == "sums"
    told = served.client.post("/v1/responses", json={"input": "How many?", "model": "poems"})
    assert told.json()["model"] == "poems" and served.engine.samplings[-1].adapter == "poems"
    listed = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["base", "poems", "sums"]
    assert httpx.get(f"{served.url}/v1/models/sums").json()["id"] == "sums"
    told = httpx.get(f"{served.url}/version").json()
    assert told["adapters"] == {"poems": "a, step 3", "sums": "b, step 3"}, "what an evaluation keeps of the weights"


def test_a_name_that_is_not_served_is_a_clear_404(serve: Serve, tmp_path: Path) -> None:
    served = serve(SAID, name="base", adapter=[f"poems={write_adapter(tmp_path / 'a')}"])
    for reply in (served.ask(model="songs"), served.client.get("/v1/models/songs")):
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
        assert reply.json()["error"]["message"] == 'there is no model "songs" here, only "base", "poems"'
    assert not served.engine.prompts


def test_mistakes_in_the_setting_are_told_before_anything_starts(serve: Serve, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    for given, message in (
        ([str(folder)], "give a name and a folder"),
        ([f"base={folder}"], "another model is called base already"),
        ([f"one={folder}", f"one={folder}"], "another model is called one already"),
    ):
        with pytest.raises(ConfigError, match=message):
            serve(SAID, name="base", adapter=given)
    with pytest.raises(ModelError, match="nowhere does not exist"):
        serve(SAID, adapter=["one=nowhere"])


def test_adapters_of_experts_are_refused_with_what_to_serve_instead(tmp_path: Path) -> None:
    matrices = {"experts.lora_gate_up_proj" + lora.A: torch.ones(3, 2, 4)}
    save_adapter(tmp_path / "experts", matrices, 2, 4.0, "")
    with pytest.raises(ModelError, match="has adapters of experts.*serve the run's merged export"):
        read_adapter(tmp_path / "experts", tmp_path, "")


def test_a_newer_version_is_taken_up_and_one_that_does_not_fit_is_not(serve: Serve, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / name, rank=rank) for name, rank in (("1", 4), ("2", 4), ("3", 8))]
    link = tmp_path / "latest-adapter"
    link.symlink_to(folders[0])
    served = serve(SAID, name="base", adapter=[f"sums={link}"], follow=True)
    for folder in folders[1:]:
        link.unlink()
        link.symlink_to(folder)
        if folder is folders[1]:
            eventually(lambda: served.server.reloads == 1)
    assert served.engine.loaded == [("sums", folders[1])] and served.server.adapters["sums"].folder == folders[1]
    assert served.ask(model="sums").status_code == 200


def test_a_version_that_comes_while_the_engine_is_dead_is_taken_later(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.follow.AGAIN_S", 0.01)
    monkeypatch.setattr("serve.follow.FOLLOW_EVERY_S", 0.01)
    folders = [write_adapter(tmp_path / name) for name in ("1", "2", "3")]
    link = tmp_path / "latest-adapter"
    link.symlink_to(folders[0])
    served = serve(SAID, name="base", adapter=[f"sums={link}"], follow=True)
    server = served.server

    async def dead_first(name: str, folder: Path) -> None:
        served.engine.dead = not served.engine.tries  # it dies of nothing, before the watch has looked
        await type(served.engine).load_adapter(served.engine, name, folder)

    monkeypatch.setattr(served.engine, "load_adapter", dead_first)
    link.unlink()
    link.symlink_to(folders[1])
    eventually(lambda: server.reloads == 1)
    assert served.engine.tries == [folders[1], folders[1]]

    resolve, failed = Path.resolve, list[Path]()

    def stale(path: Path, strict: bool = False) -> Path:
        if path == link and not failed:
            failed.append(path)
            raise OSError(116, "Stale file handle")
        return resolve(path, strict)

    monkeypatch.setattr(Path, "resolve", stale)
    eventually(lambda: bool(failed))
    link.unlink()
    link.symlink_to(folders[2])
    eventually(lambda: server.reloads == 2)
