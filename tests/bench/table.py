"""JSON lines of a benchmark -> a Markdown table.

    python tests/bench/ddp_hooks.py | python tests/bench/table.py candidate min median

Columns are keys; without arguments all keys of the first line are taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable


def cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(lines: Iterable[dict], columns: list[str] | None = None) -> str:
    rows = list(lines)
    if not rows:
        return ""
    columns = columns or list(rows[0])
    out = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        out.append("| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |")
    return "\n".join(out)


def main() -> None:
    lines = (json.loads(line) for line in sys.stdin if line.startswith("{"))
    print(table(lines, sys.argv[1:] or None))


if __name__ == "__main__":
    main()
