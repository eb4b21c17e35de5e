"""What a comparison of real result sets shows and does not invent, on the committed rows of an H200."""

from compared import COMMITTED, results

from attnbench.harness.compare.regression import compare_results
from attnbench.harness.compare.terms import Terms
from attnbench.harness.results.records import read_measurements


def measured(path):
    return [each for each in read_measurements(path) if each.measured]


def test_two_sweeps_of_one_gpu_that_ran_the_same_code_show_nothing():
    """The kernels of `forward` and of `inference`, minutes apart."""
    one, other = (
        {(str(each.spec), each.plan): each for each in measured(COMMITTED / name / "measurements.jsonl.gz")}
        for name in ("forward", "inference")
    )
    both = sorted(one.keys() & other.keys(), key=str)
    assert len(both) > 50
    sides = [results(*(side[key].model_copy(update={"case": key[0]}) for key in both)) for side in (one, other)]
    for base, new in (sides, sides[::-1]):
        assert compare_results(base, new, Terms(costs=("kernel", "prepared", "call"))).counts == {
            "uncertain": len(both)
        }
