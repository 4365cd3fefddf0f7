"""Each failure of the table: who learns what of it, within which time, and that nothing is left."""

import pytest

from failures.case import VARIABLE
from failures.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.line}: {case.name}")
def test_everybody_learns_of(case, benches):
    trials = case.trials()
    if trials == 0:
        pytest.skip(f"only with {VARIABLE}=full")
    bench = benches(case.num_hosts)
    seconds = list(case.measure(bench, trials))
    assert seconds, "nobody has learned of it"
    text = f"{max(seconds):.3f} s; the bound is {case.bound_s} s, the seed {bench.seed}"
    assert max(seconds) <= case.patience_s, text
