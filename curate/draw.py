"""Assigns languages to a share of the problems, in equal parts, with the same result on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from shared.errors import ConfigError
from shared.languages import LANGUAGES

SHARE = 0.1
"""share of the English problems (Magistral, 2506.10910, section 2.2.4)"""
FOREIGN = [code for code in LANGUAGES if code != "en"]


def place(name: str, seed: int) -> bytes:
    """Return the pseudo-random number of a name, 16 bytes."""
    return hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def draw_languages(names: Mapping[str, Sequence[str]], share: float, seed: int) -> dict[str, str]:
    """Draw name -> language for round(share * names) of the names; `names`: name -> languages that it may get.

    Names are taken in the order of their pseudo-random numbers; each gets that of its languages which has been drawn
    least often. Names without a language are skipped, but count in the share.
    """
    wanted = round(share * len(names))
    counts: dict[str, int] = {}
    drawn: dict[str, str] = {}
    for name in sorted(names, key=lambda name: place(name, seed)):
        if len(drawn) >= wanted:
            break
        possible = names[name]
        if not possible:
            continue
        chosen = min(possible, key=lambda language: (counts.get(language, 0), possible.index(language)))
        counts[chosen] = counts.get(chosen, 0) + 1
        drawn[name] = chosen
    return drawn


def check_languages(languages: Sequence[str]) -> list[str]:
    """Return the languages, each once. Raises ConfigError for one that is not supported."""
    for language in languages:
        if language not in FOREIGN:
            raise ConfigError(f"--languages: {language!r} is none of {', '.join(FOREIGN)}")
    return list(dict.fromkeys(languages))


def check_share(share: float) -> float:
    """Return the share. Raises ConfigError unless it is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ConfigError(f"--share = {share}: must be above 0 and at most 1")
    return share
