"""Small files, short functions: the limits of docs/contributing.md."""

import ast
import re
import statistics

import tree

MAX_FILE_LINES = 600
MAX_MEDIAN_FILE_LINES = 150
MAX_P90_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_P90_FUNCTION_LINES = 45


def file_lengths() -> dict[str, int]:
    return {p: len(tree.read(p).splitlines()) for p in tree.files(".h", ".cpp", ".py")}


#: The last line of a function's head, in text that clang-format has written.
HEAD_END = re.compile(r"\)( const| noexcept| override| final| mutable| -> [\w:<>*& ]+)* \{$")
STATEMENT = re.compile(
    r"\s*(if|for|while|switch|catch|do|try|else|\}|namespace|class|struct|enum)\b"
)


def cpp_functions(path: str) -> list[tuple[str, int]]:
    """Name and lines of each function at namespace scope or in a class."""
    lines = tree.read(path).splitlines()
    found = []
    for end_of_head, line in enumerate(lines):
        if not HEAD_END.search(line):
            continue
        start = end_of_head
        while start > 0 and indent(lines[start]) >= 4:
            start -= 1
        if STATEMENT.match(lines[start]) or indent(lines[start]) > 2:
            continue
        closing = " " * indent(lines[start]) + "}"
        end = next(
            (i for i in range(end_of_head, len(lines)) if lines[i].startswith(closing)), None
        )
        if end is not None:
            found.append((f"{path}:{start + 1} {lines[start].strip()}", end - start + 1))
    return found


def indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else 100


def python_functions(path: str) -> list[tuple[str, int]]:
    nodes = ast.walk(ast.parse(tree.read(path)))
    return [
        (f"{path}: {node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def function_lengths() -> dict[str, int]:
    lengths = {}
    for path in tree.files(".cpp", ".h"):
        # A TEST_CASE is a list of sections, not a function that someone has to follow.
        lengths.update((n, s) for n, s in cpp_functions(path) if "TEST_CASE" not in n)
    for path in tree.files(".py"):
        lengths.update(python_functions(path))
    return lengths


def p90(values: list[int]) -> float:
    return statistics.quantiles(values, n=10)[-1]


def test_no_file_is_too_long():
    assert not {p: n for p, n in file_lengths().items() if n > MAX_FILE_LINES}


def test_files_are_small_as_a_rule():
    lengths = list(file_lengths().values())
    assert statistics.median(lengths) <= MAX_MEDIAN_FILE_LINES
    assert p90(lengths) <= MAX_P90_FILE_LINES


def test_no_function_is_too_long():
    assert not {p: n for p, n in function_lengths().items() if n > MAX_FUNCTION_LINES}


def test_functions_are_short_as_a_rule():
    lengths = list(function_lengths().values())
    assert len(lengths) > 100, "the parser finds no functions any more"
    assert p90(lengths) <= MAX_P90_FUNCTION_LINES
