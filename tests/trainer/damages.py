"""Ways to spoil a checkpoint: each changes the newest of a run that has step_1 to step_N, and is told in some words."""

from __future__ import annotations

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


def flip(name: str, share: float, bit: int) -> Spoil:
    """Turn one bit of a file, so far into it; of a shard with name "": the last rank's."""

    def spoil(folder: Path) -> None:
        path = folder / name if name else shards_of(folder)[-1]
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1 << bit
        path.write_bytes(content)

    return spoil


def flip_exponent(folder: Path) -> None:
    """Of a weight of the first layer that there is (a large value, which is still a number)."""
    path = shards_of(folder)[0]
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    names = [name for name in header if name.startswith("weight/")]
    name = next((name for name in names if "down_proj" in name), names[0])
    content[8 + size + header[name]["data_offsets"][0] + 3] ^= 0x40
    path.write_bytes(content)


def flip_header(folder: Path) -> None:
    """A letter of a tensor's name: JSON still, and every size as it was."""
    path = shards_of(folder)[0]
    content = path.read_bytes()
    path.write_bytes(content.replace(b"exp_avg_sq/", b"exp_avg_sp/", 1))


def header_size(folder: Path) -> None:
    path = shards_of(folder)[0]
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 7 + content[7:])


def cut(name: str = "", to: float = 0.5) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / name if name else shards_of(folder)[0]
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * to)])

    return spoil


def zero(name: str = "") -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / name if name else shards_of(folder)[0]
        path.write_bytes(bytes(path.stat().st_size))

    return spoil


def zero_tail(folder: Path) -> None:
    """What a crash of the machine may leave of a file: its size, and no last pages."""
    path = shards_of(folder)[0]
    content = path.read_bytes()
    path.write_bytes(content[:-4096] + bytes(min(4096, len(content))))


def remove(name: str = "") -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name if name else shards_of(folder)[-1]).unlink()

    return spoil


def older(name: str = "") -> Spoil:
    """The same file of the checkpoint before."""

    def spoil(folder: Path) -> None:
        path = folder / name if name else shards_of(folder)[0]
        shutil.copyfile(before(folder) / path.name, path)

    return spoil


def swap_ranks(folder: Path) -> None:
    first, *_, last = shards_of(folder)
    held = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(held)


def all_older(folder: Path) -> None:
    """Every file of the checkpoint before under the newer name."""
    shutil.rmtree(folder)
    shutil.copytree(before(folder), folder)


def extra(folder: Path) -> None:
    shutil.copyfile(shards_of(folder)[0], folder / "trainer-0-of-7.safetensors")


def manifest(key: str, value: object) -> Spoil:
    """Another value in the manifest, which is written as Maestrale writes it."""

    def spoil(folder: Path) -> None:
        path = folder / "manifest.json"
        table = json.loads(path.read_text())
        path.write_text(json.dumps({**table, key: value}, indent=2))

    return spoil


def forget_a_file(folder: Path) -> None:
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    del table["files"][shards_of(folder)[-1].name]
    path.write_text(json.dumps(table, indent=2))


def cursor(folder: Path) -> None:
    """Another data cursor of as many bytes."""
    path = folder / "ledger.msgpack"
    table = bytearray(path.read_bytes())
    table[table.index(b"next_index") + len(b"next_index")] ^= 1
    path.write_bytes(table)


CHANGED, BYTES, MISSING = "was changed after it was written", "bytes instead of", "is missing"
DAMAGES: dict[str, Damage] = {
    "exponent bit of a weight": Damage(flip_exponent, CHANGED),
    "last bit of a moment": Damage(flip("", 0.9, 0), CHANGED),
    "sign bit in the middle of a shard": Damage(flip("", 0.5, 7), CHANGED),
    "letter in a shard's header": Damage(flip_header, CHANGED),
    "size of a shard's header": Damage(header_size, CHANGED),
    "shard cut in half": Damage(cut(), BYTES),
    "shard without its last byte": Damage(cut(to=0.9999), BYTES),
    "empty shard": Damage(cut(to=0), BYTES),
    "zeroed shard": Damage(zero(), CHANGED),
    "zeroed last page": Damage(zero_tail, CHANGED),
    "missing shard": Damage(remove(), MISSING),
    "shard of the step before": Damage(older(), "wrote at version"),
    "bit in the ledger": Damage(flip("ledger.msgpack", 0.5, 0), CHANGED),
    "another data cursor": Damage(cursor, CHANGED),
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
