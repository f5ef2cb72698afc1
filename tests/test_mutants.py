"""The planted faults of tests/planted_faults can be planted: their texts stand in the product once."""

import pytest

from tests import mutants
from tests.quick import is_there

FAULTS = mutants.planted()


def test_there_are_many_with_tests_that_are_there():
    assert len(FAULTS) > 150
    tests = {test.partition("[")[0] for fault in FAULTS for test in fault.tests if "::" in test}
    assert [test for test in sorted(tests) if not is_there(test)] == []


@pytest.mark.parametrize("room", sorted({fault.room for fault in FAULTS}))
def test_each_can_be_planted(room):
    for fault in (fault for fault in FAULTS if fault.room == room):
        assert mutants.wrong_text(fault) != (mutants.ROOT / fault.file).read_text(encoding="utf-8")


def test_a_fault_whose_line_has_changed_is_an_error(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    fault = mutants.Fault("room", "a.py", "= 1", "= 2", ("tests",))
    with pytest.raises(ValueError, match="2 times"):
        mutants.wrong_text(fault, tmp_path)
    assert mutants.wrong_text(fault._replace(right="x = 1", wrong="x = 2"), tmp_path) == "x = 2\ny = 1\n"
