"""A process of the answer checker for tests of what is around it: it loads SymPy when it is first asked for."""

from shared.launch.calls import call
from shared.types import Verdict
from verify.checker_process import CheckerProcess, Reply


class QuickStart(CheckerProcess):
    """It starts in a tenth of the time."""

    @call("load", deadline=120.0)
    def begin(self) -> Reply:
        from verify.math.algebra import equal

        self.equal = equal
        return Reply(Verdict.CORRECT, 0)
