"""Every Python snippet in README.md and docs runs as it is printed."""

import ast
from pathlib import Path

import pytest
import snippets
from launches import finish, launch, ranks

RUNNER = Path(__file__).with_name("snippet_rank.py")


NOT_RUN = [s for page in snippets.PAGES for s in snippets.of(page, "python") if s.reason]


def wanted(page: str, is_alone: bool) -> list[str]:
    """What the runner prints of those that run to their end."""
    found = [s for s in snippets.of(page, "python") if not s.reason]
    return [f"ran {s.place}" for s in found if ("alone" in s.words) == is_alone]


def run(page: str, folder: Path, *launcher: str) -> list[str]:
    [(status, output)] = finish(launch([*launcher, RUNNER, page], folder), deadline=180)
    assert status == 0, output
    return [line for line in output.splitlines() if line.startswith("ran ")]


@pytest.mark.parametrize("page", [p for p in snippets.PAGES if wanted(p, is_alone=False)])
def test_on_two_ranks(page, tmp_path):
    launcher = ranks(2, forked=page != "README.md")
    assert sorted(run(page, tmp_path, *launcher)) == sorted(2 * wanted(page, is_alone=False))


@pytest.mark.parametrize("page", [p for p in snippets.PAGES if wanted(p, is_alone=True)])
def test_in_one_process(page, tmp_path):
    assert run(page, tmp_path) == wanted(page, is_alone=True)


@pytest.mark.parametrize("snippet", NOT_RUN, ids=lambda s: s.place)
def test_what_does_not_run_is_python_and_its_imports_are_there(snippet):
    """What needs a GPU, say. Its names of libddp exist all the same."""
    tree = ast.parse(snippet.numbered, snippet.page)
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in lines:
        exec(compile(ast.Module([node], []), snippet.page, "exec"), {})
