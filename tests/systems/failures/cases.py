"""All cases, in the order of the table."""

from failures import (  # noqa: F401
    cases_abort,
    cases_clock,
    cases_death,
    cases_frozen,
    cases_mismatch,
    cases_network,
    cases_numbers,
    cases_slow,
    cases_store,
    cases_versions,
)
from failures.case import CASES  # noqa: F401
