"""Ways to spoil a checkpoint: each changes the newest of a run that has step_1 to step_N, and is told in some words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Spoil = Callable[[Path], None]


class Damage(NamedTuple):
    """One fault."""

    spoil: Spoil
    """given the newest checkpoint's folder"""
    told: str
    """a part of what must be said"""


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("trainer-*.safetensors"))


def before(folder: Path) -> Path:
    """The checkpoint before."""
    return folder.with_name(f"step_{int(folder.name.removeprefix('step_')) - 1}")


def file(folder: Path, name: str, rank: int = 0) -> Path:
    """The file of this name; with "" the shard of this rank, -1 for the last."""
    return folder / name if name else shards_of(folder)[rank]


def edit(change: Callable[[bytes], bytes], name: str = "", rank: int = 0) -> Spoil:
    def spoil(folder: Path) -> None:
        path = file(folder, name, rank)
        path.write_bytes(change(path.read_bytes()))

    return spoil


def flip(name: str, share: float, bit: int) -> Spoil:
    """Turn one bit of a file, so far into it; of a shard with name "": the last rank's."""

    def change(content: bytes) -> bytes:
        offset = int(share * (len(content) - 1))
        return content[:offset] + bytes([content[offset] ^ 1 << bit]) + content[offset + 1 :]

    return edit(change, name, rank=-1)


def exponent(content: bytes) -> bytes:
    """Of a weight of the first layer that there is (a large value, which is still a number)."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    names = [name for name in header if name.startswith("weight/")]
    name = next((name for name in names if "down_proj" in name), names[0])
    offset = 8 + size + header[name]["data_offsets"][0] + 3
    return content[:offset] + bytes([content[offset] ^ 0x40]) + content[offset + 1 :]


def cut(name: str = "", to: float = 0.5) -> Spoil:
    return edit(lambda content: content[: int(len(content) * to)], name)


def zero(name: str = "") -> Spoil:
    return edit(lambda content: bytes(len(content)), name)


def remove(name: str = "") -> Spoil:
    return lambda folder: file(folder, name, rank=-1).unlink()


def older(name: str = "") -> Spoil:
    """The same file of the checkpoint before."""

    def spoil(folder: Path) -> None:
        path = file(folder, name)
        shutil.copyfile(before(folder) / path.name, path)

    return spoil


def swap_ranks(folder: Path) -> None:
    first, *_, last = shards_of(folder)
    content = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(content)


def all_older(folder: Path) -> None:
    """Every file of the checkpoint before under the newer name."""
    shutil.rmtree(folder)
    shutil.copytree(before(folder), folder)


def extra(folder: Path) -> None:
    shutil.copyfile(shards_of(folder)[0], folder / "trainer-0-of-7.safetensors")


def manifest(key: str, value: object) -> Spoil:
    """Another value in the manifest, which is written as Maestrale writes it."""
    return edit(lambda content: json.dumps({**json.loads(content), key: value}, indent=2).encode(), "manifest.json")


def forget_a_file(folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_bytes())["files"]
    manifest("files", {name: entry for name, entry in files.items() if name != shards_of(folder)[-1].name})(folder)


def another_cursor(content: bytes) -> bytes:
    """Another data cursor of as many bytes."""
    offset = content.index(b"next_index") + len(b"next_index")
    return content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]


flip_exponent = edit(exponent)
CHANGED, BYTES, MISSING = "was changed after it was written", "bytes instead of", "is missing"
DAMAGES: dict[str, Damage] = {
    "exponent bit of a weight": Damage(flip_exponent, CHANGED),
    "last bit of a moment": Damage(flip("", 0.9, 0), CHANGED),
    "sign bit in the middle of a shard": Damage(flip("", 0.5, 7), CHANGED),
    "letter in a shard's header": Damage(edit(lambda c: c.replace(b"exp_avg_sq/", b"exp_avg_sp/", 1)), CHANGED),
    "size of a shard's header": Damage(edit(lambda c: b"\xff" * 7 + c[7:]), CHANGED),
    "shard cut in half": Damage(cut(), BYTES),
    "shard without its last byte": Damage(cut(to=0.9999), BYTES),
    "empty shard": Damage(cut(to=0), BYTES),
    "zeroed shard": Damage(zero(), CHANGED),
    "zeroed last page": Damage(edit(lambda c: c[:-4096] + bytes(min(4096, len(c)))), CHANGED),
    "missing shard": Damage(remove(), MISSING),
    "shard of the step before": Damage(older(), "wrote at version"),
    "bit in the ledger": Damage(flip("ledger.msgpack", 0.5, 0), CHANGED),
    "another data cursor": Damage(edit(another_cursor, "ledger.msgpack"), CHANGED),
    "ledger of the step before": Damage(older("ledger.msgpack"), "ledger.msgpack"),
    "ledger cut": Damage(cut("ledger.msgpack"), BYTES),
    "bit in the checksums of weights": Damage(flip("checksums.msgpack", 0.5, 0), CHANGED),
    "missing checksums of weights": Damage(remove("checksums.msgpack"), MISSING),
    "missing ledger": Damage(remove("ledger.msgpack"), MISSING),
    "bit in the origin": Damage(flip("origin.json", 0.5, 0), CHANGED),
    "missing origin": Damage(remove("origin.json"), MISSING),
    "bit in the manifest": Damage(flip("manifest.json", 0.7, 0), "manifest.json"),
    "manifest cut": Damage(cut("manifest.json"), "manifest.json is damaged"),
    "zeroed manifest": Damage(zero("manifest.json"), "manifest.json is damaged"),
    "missing manifest": Damage(remove("manifest.json"), MISSING),
    "another version in the manifest": Damage(manifest("version", 1), CHANGED),
    "unknown format": Damage(manifest("format", 9), "has format 9"),
    "older format": Damage(manifest("format", 1), "older version of Maestrale"),
    "a file struck from the manifest": Damage(forget_a_file, CHANGED),
    "manifest of the step before": Damage(older("manifest.json"), "under another name"),
    "the whole step before under this name": Damage(all_older, "under another name"),
    "a file too many": Damage(extra, "was not written with it"),
}
TWO_RANKS: dict[str, Damage] = {"shards of two ranks swapped": Damage(swap_ranks, "trainer-0-of-2.safetensors ")}
"""need a checkpoint of two trainers"""
