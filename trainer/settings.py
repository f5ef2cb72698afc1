"""Loads the settings of a run with every check that more than one section needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from shared import settings_file
from shared.config import Config


def load(path: str, overrides: list[str]) -> Config:
    """The settings of a file, with options as overrides. Raises ConfigError, also for an unknown reward."""
    from trainer.data.sources import missing_settings
    from trainer.objectives.registry import complaints
    from trainer.trackers import not_installed
    from verify.chosen_rewards import choose

    settings = [given for given in overrides if given not in (settings_file.ACCEPT_CHANGES, settings_file.DASHBOARD)]

    def mistakes(config: Config) -> Iterator[str]:
        for check in (missing_settings, complaints, not_installed):
            yield from check(config)

    config = settings_file.load(path, settings, mistakes, os.environ)
    for stage in config.every_stage:
        choose(stage.reward)
    return config
