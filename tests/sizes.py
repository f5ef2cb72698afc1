"""The size of the project: `make sizes` prints lines, files, public names and settings by room, with their ceilings.

A line is a line of a Python file, comments and blank ones included. A public name is a class or function at the top of
a module, or a method, without an underscore at its beginning. JavaScript is not counted. A setting is a name that
`python -m trainer --help` lists outside the sections that validate their own, which are objectives and judges.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from shared.settings_file import SECTIONS, SETTINGS

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    *("shared", "verify", "environments", "rollout", "trainer", "serve"),
    *("dashboard", "evaluation", "oversight", "curate", "lab", "examples", "maestrale"),
)
TRAINING = ("shared", "rollout", "trainer")
"""what a person reads to change training"""
OTHERS = ("benchmarks", "tests")
APART = ("reward.judge.", "environment.")
"""settings of the judge and of environments, which validate their own"""
CEILINGS = {
    "shared": 12_525,
    "verify": 17_068,
    "environments": 2_891,
    "rollout": 5_183,
    "trainer": 14_677,
    "serve": 6_788,
    "dashboard": 1_886,
    "evaluation": 2_476,
    "oversight": 1_870,
    "curate": 3_198,
    "lab": 3_215,
    "examples": 2_612,
    "maestrale": 195,
}
"""Most lines of each room. One rises only in a commit that lowers another by as much, so that their sum never rises; a
commit that makes a room smaller lowers its ceiling. 0.1.0 raised it once, by 801 lines: a session from Python, TRL's
rewards, the command `maestrale`, an engine's last words, threads that are measured. Models of many cards may raise it
by 900; 847 are used by trainers that split layers, tokens or experts, tables sharded by themselves, layers' inputs on
the host, a head in float32. The controller at scale took 533 more: checksums that the trainers add up, routes of
mixtures in files, a store of several nodes; betas, epsilon and cosine decay 17. Calls of served models as they were
trained to write them raised it by 64, what a third newcomer met by 112."""
BUDGETS = {
    "product lines": sum(CEILINGS.values()),
    "training lines": sum(CEILINGS[room] for room in TRAINING),
    "lines to read": 3_700,
    "files": 447,
    "settings": 104,
    "class names used twice": 0,
}
READING = (
    *("trainer/controller", "trainer/ledger", "shared/types", "shared/launch/calls", "trainer/step/rank"),
    *("trainer/step/forward_backward", "trainer/objectives/objective", "trainer/objectives/registry"),
    *("trainer/objectives/loss", "trainer/objectives/clip", "rollout/worker", "rollout/engine", "rollout/client"),
)
"""files that you must read before you change how a run trains"""
LONG_FILE = 400
"""a file with more lines is worth a look: perhaps it holds two ideas"""


class Room(NamedTuple):
    """What one folder holds."""

    lines: int
    files: int
    names: int


def sources(room: str) -> list[Path]:
    """The Python files of a room."""
    return sorted((ROOT / room).rglob("*.py"))


def measure(room: str) -> Room:
    """Count a room."""
    files = sources(room)
    return Room(sum(len(text(path).splitlines()) for path in files), len(files), sum(map(public_names, files)))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def public_names(path: Path) -> int:
    """Classes and functions of a module, and methods of its classes, without an underscore at their beginning."""
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    top = [node for node in ast.parse(text(path)).body if isinstance(node, defined)]
    methods = [
        node for kind in top if isinstance(kind, ast.ClassDef) for node in kind.body if isinstance(node, defined)
    ]
    return sum(not node.name.startswith("_") for node in (*top, *methods))


def classes_used_twice() -> dict[str, list[str]]:
    """Public class names that several modules of the product define, and where."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for room in PRODUCT:
        for path in sources(room):
            for node in ast.parse(text(path)).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def long_files() -> list[str]:
    """Files of the product with more than LONG_FILE lines, and how many they have."""
    sizes = {path: len(text(path).splitlines()) for room in PRODUCT for path in sources(room)}
    return [f"{path.relative_to(ROOT)} ({lines})" for path, lines in sorted(sizes.items()) if lines > LONG_FILE]


def settings() -> list[str]:
    """The names of the settings that count."""
    return [key for key in SETTINGS if key not in SECTIONS and not key.startswith(APART)]


def totals() -> dict[str, int]:
    """What has a budget."""
    rooms = {room: measure(room) for room in PRODUCT}
    return {
        "product lines": sum(room.lines for room in rooms.values()),
        "training lines": sum(rooms[name].lines for name in TRAINING),
        "lines to read": sum(len(text(ROOT / f"{name}.py").splitlines()) for name in READING),
        "files": sum(room.files for room in rooms.values()),
        "settings": len(settings()),
        "class names used twice": len(classes_used_twice()),
    }


def main() -> None:
    """Print the tables."""
    print(f"{'room':12} {'lines':>8} {'ceiling':>8} {'files':>6} {'public names':>13}")
    for room in (*PRODUCT, *OTHERS):
        size, ceiling = measure(room), f"{CEILINGS[room]:,}" if room in CEILINGS else ""
        print(f"{room:12} {size.lines:8,} {ceiling:>8} {size.files:6} {size.names:13,}")
    print(f"\n{'total':24} {'now':>8} {'budget':>8}")
    for name, now in totals().items():
        print(f"{name:24} {now:8,} {BUDGETS[name]:8,}")
    sections = Counter(key.split(".")[0] if "." in key else "top" for key in settings())
    print("\nsettings: " + ", ".join(f"{name} {count}" for name, count in sections.most_common()))
    twice = (f"{name} {len(where)}" for name, where in classes_used_twice().items())
    print("class names used twice: " + ", ".join(twice))
    print(f"files with more than {LONG_FILE} lines (a hint): " + (", ".join(long_files()) or "none"))


if __name__ == "__main__":
    main()
