"""Other projects' programs around our attention: what becomes of each of their cases.

Not part of the default run: ``tox -e peers`` sets ATTNBENCH_PEERS and installs the libraries that constraints.txt pins.
"""

import os
import warnings
from collections import Counter, defaultdict

import pytest
import torch
from tabulate import tabulate

from attnbench.errors import AttnbenchWarning, InputError, NoPlanError, RefusedError

collect_ignore_glob = [] if os.environ.get("ATTNBENCH_PEERS") else ["test_*.py"]

OUTCOMES = ["served", "handed on", "refused", "unasked", "wrong", "crashed"]
REFUSALS = (InputError, RefusedError, NoPlanError)


class Verdicts:
    """Writes down what became of a library's cases, and remembers those that are ours to mend."""

    def __init__(self, library, properties):
        self.library, self.faults, self._properties = library, [], properties

    def write(self, case, outcome, detail=""):
        assert outcome in OUTCOMES
        fault = f"{case}: {outcome} {detail}" if outcome in ("wrong", "crashed") else None
        # Where several processes run the tests, a report's properties are what reaches the one that prints.
        self._properties.append(("verdict", (self.library, outcome, fault)))
        if fault is not None:
            self.faults.append(fault)

    def judge(self, case, wanted, ours, *, handing_on=None, least=1e-4):
        """Compare what ``ours()`` gives, a pair of a tensor and the counts, with the tensor ``wanted``.

        Where it is refused, ``handing_on()`` has to give what the library computes.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found, calls = ours()
        except REFUSALS:
            if handing_on is None:
                return self.write(case, "refused")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found, calls = handing_on()
            except REFUSALS:
                return self.write(case, "refused")
            except Exception as error:
                return self.write(case, "crashed", f"{type(error).__name__}: {str(error)[:200]}")
        except Exception as error:
            return self.write(case, "crashed", f"{type(error).__name__}: {str(error)[:200]}")
        if (off := distance(found, wanted)) > least:
            return self.write(case, "wrong", f"{off:.2g} off")
        if calls.handed_on:
            return self.write(case, "handed on")
        return self.write(case, "served" if calls.served else "unasked")


def distance(found, wanted):
    """The relative L2 distance; what is not finite in both is left out."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.detach().double(), wanted.detach().double()
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    found, wanted = found[finite], wanted[finite]
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.fixture
def verdicts(request):
    """The verdicts of the library that the test's module names; the test fails where one is wrong or crashes."""
    found = Verdicts(request.module.LIBRARY, request.node.user_properties)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttnbenchWarning)
        yield found
    assert not found.faults, "\n".join(found.faults)


def pytest_terminal_summary(terminalreporter):
    reports = [each for kind in terminalreporter.stats.values() for each in kind if getattr(each, "when", "") == "call"]
    verdicts = [value for each in reports for name, value in each.user_properties if name == "verdict"]
    found = defaultdict(Counter)
    for library, outcome, _ in verdicts:
        found[library][outcome] += 1
    if not found:
        return
    terminalreporter.section("what became of the cases")
    rows = [[library, sum(counts.values()), *(counts[each] for each in OUTCOMES)] for library, counts in found.items()]
    terminalreporter.write_line(tabulate(rows, ["library", "cases", *OUTCOMES]))
    for library, _, fault in verdicts:
        if fault is not None:
            terminalreporter.write_line(f"{library} {fault}")
