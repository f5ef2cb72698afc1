"""`python -m trainer check [SETTINGS.toml]`: what of this machine and these settings could stop a launch, before one.

Every finding is OK, WARN (it runs, but) or FAIL (it does not), and all but OK name the next step. CUDA is touched in a
process of its own only, so that nothing here is in the way of a fork.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from shared.config import Config
from shared.errors import ConfigError, InputError, MaestraleError, command_of
from shared.model import hf
from shared.model.config import DecoderConfig
from shared.user_file import missing
from trainer.check import machine
from trainer.check.cards import driver, use_of_cards
from trainer.check.finding import CheckFinding
from trainer.check.inspection import HUB_S, findings_of, inspect
from trainer.check.plan import model_shape
from trainer.data.environment_rows import environment_lines
from trainer.data.sources import check_model

USAGE = """usage: python -m trainer check [SETTINGS.toml] [--section.key=value ...] [--json]

Looks at this machine and, where they are given, at the settings: packages, driver, cards, memory, NCCL, /dev/shm,
compilers, isolation of programs, disk, ports, data and model. Prints OK, WARN or FAIL for each with the next step;
exit code 0 without a FAIL, 1 with one, 2 for an option that is wrong."""


def main(arguments: Sequence[str], load: Callable[[str, list[str]], Config], show: Callable[[str], None]) -> int:
    """Check, show the findings as they come, and return the exit code. load: reads settings, from path and options."""
    words = [word for word in arguments if word != "--json"]
    if "--help" in words or "-h" in words:
        show(USAGE)
        return 0
    if words and words[0].startswith("-"):
        show(f"error: {words[0]}: a settings file comes first\n{USAGE}")
        return InputError.exit_code
    findings = []
    for finding in examine(words, load):
        findings.append(finding)
        if "--json" not in arguments:
            show(finding.line)
    counts = {status: sum(one.status == status for one in findings) for status in ("OK", "WARN", "FAIL")}
    if "--json" in arguments:
        rows = [{"name": one.name, "status": one.status, "text": one.text, "next": one.step} for one in findings]
        show(json.dumps({"findings": rows, **counts}, ensure_ascii=False))
    else:
        show(f"{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL")
    return int(counts["FAIL"] > 0)


def examine(words: Sequence[str], load: Callable[[str, list[str]], Config]) -> Iterator[CheckFinding]:
    """Yield every finding. words: settings file and options, none for the machine alone."""
    config, shape = None, None
    if words:
        try:
            config = load(words[0], list(words[1:]))
            with suppress(MaestraleError):  # `model_access` says it
                shape = model_shape(config)
            yield CheckFinding("settings", "OK", f"{words[0]}: {config.world_size} ranks, run folder {config.run_dir}")
        except MaestraleError as error:
            yield CheckFinding(
                "settings", "FAIL", str(error), f"correct the file ({command_of('trainer')} --help lists all)"
            )
    yield machine.packages()
    cards, finding = driver()
    yield finding
    if cards:
        yield from use_of_cards(cards, config, shape)
    yield machine.host_memory(config, shape, bool(cards))
    yield machine.shared_memory(len(cards) > 1)
    yield machine.compilers(bool(cards), config)
    yield machine.isolation(config)
    yield machine.disk(config, shape)
    yield machine.ports()
    if config is not None:
        yield from data_and_model(config, shape)


def data_and_model(config: Config, shape: DecoderConfig | None) -> Iterator[CheckFinding]:
    """Yield what was read of the data and of the chat template, and whether the model can be had."""
    inspection, model = inspect(config), model_access(config, shape)
    for result in inspection.results.values():
        if result.name != "template" or model.status == "OK" or result.error is None:  # else it is for the same cause
            yield from findings_of(result)
    lines = list(environment_lines(config, inspection.environments))
    if lines and inspection.results["environments"].error is None:
        yield CheckFinding("environments", "OK", "; ".join(" ".join(line.split()) for line in lines[:-1]))
    yield model


def model_access(config: Config, shape: DecoderConfig | None) -> CheckFinding:
    """Whether the model's folder is whole, or the Hub gives it."""
    path = config.locate(config.model.path)
    if config.model.path.startswith("made/") and not Path(path).is_dir():
        return CheckFinding("model", "OK", f"{config.model.path} is made at the start by {config.prepare.script}")
    if Path(path).is_dir():
        try:
            check_model(config, Path(path))
        except MaestraleError as error:
            again = "fetch the model again, or name another one in model.path"
            step = "change the setting that it names" if isinstance(error, ConfigError) else again
            return CheckFinding("model", "FAIL", str(error), step)
        parameters = shape.parameters / 1e6 if shape is not None else 0.0
        return CheckFinding("model", "OK", f"{path}: {parameters:,.1f} M parameters")
    if not hf.may_be_hub_id(path):
        step = "correct model.path, which starts at the working directory"
        return CheckFinding("model", "FAIL", f"model.path = '{path}': {missing(Path(path), 'folder', '*/')}", step)
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return CheckFinding("model", "OK", f"{path} is in Hugging Face's cache")
        HfApi().model_info(path, timeout=HUB_S)
    except Exception as error:  # noqa: BLE001 - the hub's client raises errors of several libraries
        first = (str(error).splitlines() or ["no reason given"])[0]
        text = f"model.path = {path!r} is no folder, and the Hub does not give it ({type(error).__name__}: {first})"
        step = "check the name and the network, 'hf auth login' for a gated model; offline: 'hf download' it elsewhere "
        return CheckFinding("model", "FAIL", text, f"{step}and set model.path to the folder")
    return CheckFinding("model", "OK", f"{path}: the Hub gives it")
