"""Adapters beside a served model, over a scripted engine: names, prompts, mistakes, newer versions. With vLLM:
test_vllm_engine.py."""

import json
from pathlib import Path

import pytest
import torch

from serve.adapters import read_adapter
from shared.errors import ConfigError, ModelError
from shared.model import hf, lora
from shared.model.adapter_folder import save_adapter
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder
from shared.model.model_card import CARD
from tests.serve.conftest import eventually
from tests.serve.test_operation import count_looks, move

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


def test_each_name_gets_its_adapter_and_its_system_prompt(serve, tmp_path):
    poems, sums = write_adapter(tmp_path / "a", prompt="Write poems."), write_adapter(tmp_path / "b", prompt="Add up.")
    served = serve(SAID, name="base", system_prompt="trained", adapter=[f"poems={poems}", f"sums={sums}"])
    engine, client = served.engine, served.client
    for model, prompt in (("poems", "Write poems."), ("sums", "Add up."), ("base", ""), ("", "")):
        reply = served.ask("How many?", model=model).json()
        assert reply["model"] == (model or "base")
        assert engine.samplings[-1].adapter == ("" if model in ("", "base") else model)
        assert (prompt in engine.prompts[-1]) and ("poems" in engine.prompts[-1]) == (model == "poems")
    raw = client.post("/v1/completions", json={"prompt": "2 + 3 =", "model": "sums"})
    assert raw.json()["model"] == engine.samplings[-1].adapter == "sums"
    response = client.post("/v1/responses", json={"input": "How many?", "model": "poems"})
    assert response.json()["model"] == engine.samplings[-1].adapter == "poems"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["base", "poems", "sums"]
    assert client.get("/v1/models/sums").json()["id"] == "sums"
    versions = client.get("/version").json()["adapters"]
    assert versions == {"poems": "a, step 3", "sums": "b, step 3"}, "what an evaluation keeps of the weights"
    asked = len(engine.prompts)
    for reply in (served.ask(model="songs"), client.get("/v1/models/songs")):
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
        assert reply.json()["error"]["message"] == 'there is no model "songs" here, only "base", "poems", "sums"'
    assert len(engine.prompts) == asked


def test_mistakes_in_the_setting_are_told_before_anything_starts(serve, tmp_path):
    folder = write_adapter(tmp_path / "a")
    for given, message in (
        ([str(folder)], "give a name and a folder"),
        ([f"base={folder}"], "another model is called base already"),
        ([f"one={folder}", f"one={folder}"], "another model is called one already"),
    ):
        with pytest.raises(ConfigError, match=message):
            serve(SAID, name="base", adapter=given)
    with pytest.raises(ModelError, match="adapter .*nowhere: there is no such folder"):
        serve(SAID, adapter=["one=nowhere"])
    matrices = {"experts.lora_gate_up_proj" + lora.A: torch.ones(3, 2, 4)}
    save_adapter(tmp_path / "experts", matrices, 2, 4.0, "")
    with pytest.raises(ModelError, match="has adapters of experts.*serve the run's merged export"):
        read_adapter(tmp_path / "experts", tmp_path, "")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Versions of an adapter; the last does not fit. The link "latest" beside them leads to the first."""
    monkeypatch.setattr("serve.follow.AGAIN_S", 0.01)
    monkeypatch.setattr("serve.follow.FOLLOW_EVERY_S", 0.01)
    folders = [write_adapter(tmp_path / str(number), rank=8 if number == 3 else 4) for number in range(4)]
    move(tmp_path / "latest", folders[0])
    return folders


def test_a_newer_version_is_taken_up_and_one_that_does_not_fit_is_not(serve, folders, caplog, monkeypatch):
    link = folders[0].with_name("latest")
    served = serve(SAID, name="base", adapter=[f"sums={link}"], follow=True)
    move(link, folders[1])
    eventually(lambda: served.server.reloads == 1)
    move(link, folders[3])
    eventually(lambda: "rank 8 is above 4" in caplog.text)
    looks = count_looks(link, monkeypatch)
    eventually(lambda: len(looks) > 20)
    assert caplog.text.count("rank 8 is above 4") == 1, "it is told once"
    assert served.engine.loaded == [("sums", folders[1])] and served.server.adapters["sums"].folder == folders[1]
    assert served.ask(model="sums").status_code == 200


def test_a_version_that_comes_while_the_engine_is_dead_is_taken_later(serve, folders, monkeypatch):
    link = folders[0].with_name("latest")
    served = serve(SAID, name="base", adapter=[f"sums={link}"], follow=True)

    async def dead_first(name: str, folder: Path) -> None:
        served.engine.dead = not served.engine.tries  # it dies of nothing, before the watch has looked
        await type(served.engine).load_adapter(served.engine, name, folder)

    monkeypatch.setattr(served.engine, "load_adapter", dead_first)
    move(link, folders[1])
    eventually(lambda: served.server.reloads == 1)
    assert served.engine.tries == [folders[1], folders[1]]

    resolve, failed = Path.resolve, list[Path]()

    def stale(path: Path, strict: bool = False) -> Path:
        if path == link and not failed:
            failed.append(path)
            raise OSError(116, "Stale file handle")
        return resolve(path, strict)

    monkeypatch.setattr(Path, "resolve", stale)
    eventually(lambda: bool(failed))
    move(link, folders[2])
    eventually(lambda: served.server.reloads == 2)
