"""The last lines of `make test`: what was not run, why, and what brings it."""

import pytest

from tests.skipped import class_of, summary


@pytest.mark.parametrize(("reason", "name"), [
    ("Skipped: needs 2 NVIDIA GPUs, this machine has none", "no NVIDIA GPU, or too few"),
    ("browser tests need Chromium: apt install chromium", "programs of the system"),
    ("g++ is not installed", "programs of the system"),
    ("network namespaces are needed: run this as root", "rights"),
    ("models/smollm2-135m-instruct is not there: make smollm2 says how to make it", "a real model"),
    ("the problem sets (../shared/data) are not on this machine", "problem sets"),
    ("the clients in x are not installed: make install-clients", "other people's programs"),
    ('the extra "wandb" is not installed', "optional packages"),
    ("could not import 'peft': No module named 'peft'", "optional packages"),
    ("the IPv6 loopback is another address", "another kind of machine"),
])  # fmt: skip
def test_a_reason_has_a_class_with_a_remedy(reason, name):
    assert class_of(reason) == name


def test_the_lines_count_by_class():
    assert summary(["g++ is not installed", "needs chromium", "needs root"]) == [
        "2 not run: programs of the system (apt install chromium g++ libtcmalloc-minimal4 python3-dev)",
        "1 not run: rights (run as root, on a host that allows them)",
    ]
    assert summary([]) == []
