"""`python -m environments [FILE.py ...]`: every environment with what it is, who grades it, and its options.

FILE.py: plug-in files, as of environment.plugins; they are run in this process.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from environments.environment import ENVIRONMENTS, Environment, load_ready
from shared.errors import ConfigError, print_error, run_command
from shared.settings_file import literal, meaning, type_name
from shared.user_file import run_file


def describe(name: str, kind: type[Environment]) -> str:
    """Name, first paragraph of the docstring, and the options with type, default and meaning."""
    summary = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    graded = "graded by the verifier of the problem's domain" if kind.verified else "gives the reward itself"
    lines = [name, f"    {' '.join(summary.split())} ({graded})" if summary else f"    ({graded})"]
    for option, field in kind.Options.model_fields.items():
        default = field.get_default(call_default_factory=True)
        needed = field.is_required() or default is None
        shown = "  (needed)" if field.is_required() else "  (not set)" if needed else f" = {literal(default)}"
        lines.append(f"    environment.options.{name}.{option}{shown}")
        lines.append(f"        {meaning(field)} ({type_name(field)})")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the list; returns the exit code."""
    if any(argument.startswith("-") for argument in arguments):
        print("usage: python -m environments [FILE.py ...]")
        return 0 if {*arguments} <= {"-h", "--help"} else ConfigError.exit_code
    try:
        load_ready()
        for file in arguments:
            run_file(Path(file), "environments")
    except ConfigError as error:
        return print_error(error)
    print("\n\n".join(describe(one.name, one.make) for _, one in sorted(ENVIRONMENTS.items())))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
