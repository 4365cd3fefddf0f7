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


#: The head of a class of a namespace, of which a header has the body.
CLASS = re.compile(
    r"^(?:class|struct|enum class) ([A-Z]\w*)(?: final)?(?: : [^;{]*)? \{", re.MULTILINE
)


def test_no_two_headers_have_a_class_of_one_name():
    """They would be one to the linker, whichever room they are in."""
    headers = defaultdict(set)
    for path in tree.files(".h"):
        if path.startswith("libddp/"):
            for name in CLASS.findall(tree.read(path)):
                headers[name].add(path)
    assert len(headers) > 200, "the parser finds no classes any more"
    assert {name: paths for name, paths in headers.items() if len(paths) > 1} == {}
