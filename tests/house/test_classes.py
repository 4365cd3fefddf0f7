"""One class, one source file: docs/contributing.md."""

import re
from collections import defaultdict

import tree

#: The head of a method that is defined outside of its class, as clang-format writes it.
METHOD = re.compile(
    r"^(?=[A-Za-z])(?!using|typedef|extern)[\w:<>,&*~ \[\]]*?\b((?:[A-Z]\w*::)+)~?\w+\("
)


def classes_of(path: str) -> set[str]:
    """Those of which a source file defines methods; nested ones by their whole name."""
    found = (METHOD.match(line) for line in tree.read(path).splitlines())
    return {match[1].removesuffix("::") for match in found if match}


def sources_of_classes() -> dict[str, set[str]]:
    sources = defaultdict(set)
    for path in tree.files(".cpp"):
        if path.startswith("libddp/"):
            for name in classes_of(path):
                sources[name].add(path)
    return sources


def test_a_class_has_one_source_file():
    sources = sources_of_classes()
    assert len(sources) > 50, "the parser finds no methods any more"
    assert [name for name, paths in sources.items() if len(paths) > 1] == []
