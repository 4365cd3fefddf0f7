"""A few trials of each row of the failure table; `table.py` has 50 of each.

Long waits (a refused second job waits for half a minute, launchers import torch) are in the long
mode only; the others take a second or two each.
"""

import pytest
import rows_agent  # noqa: F401
import rows_hosts  # noqa: F401
import rows_keeper  # noqa: F401
import rows_misuse  # noqa: F401
import rows_network  # noqa: F401
import rows_s3  # noqa: F401
import rows_storage  # noqa: F401
import rows_workers  # noqa: F401
from rows import ROWS, Arena, Skipped, run


@pytest.fixture(scope="module")
def arena():
    with Arena() as shared:
        yield shared


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.quick])
def test_row(arena, name):
    row = ROWS[name]
    for number in range(row.quick):
        try:
            run(arena, row, number, row.quick)
        except Skipped as reason:
            pytest.skip(str(reason))


def test_rows_say_what_they_assert():
    assert len(ROWS) > 30
    for row in ROWS.values():
        assert row.asserts, row.name
