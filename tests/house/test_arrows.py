"""Rooms include only the rooms on their line of the design; no cycles, no orphans."""

import re
from graphlib import TopologicalSorter

import tree


def library_files() -> list[str]:
    return [p for p in tree.files(".h", ".cpp", under="libddp/") if p.count("/") >= 2]


def test_every_library_file_stands_in_a_room():
    odd = [p for p in library_files() if tree.room_of(p) not in tree.ROOMS]
    assert not odd


def test_rooms_include_only_what_the_design_allows():
    wrong = []
    for path in library_files():
        room = tree.room_of(path)
        for header in tree.includes(path):
            other = header.split("/")[1]
            if other != room and other not in tree.ROOMS[room]:
                wrong.append(f"{path} includes {header}")
    assert not wrong


def test_the_design_names_the_same_arrows():
    table = re.findall(r"\| `libddp/(\w+)` \| ([^|]*) \|", tree.read("docs/design.md"))
    above, said = set(), {}
    for room, rooms in table:
        said[room] = set(above) if rooms == "the above" else set(re.findall(r"\w+", rooms))
        above.add(room)
    assert said == tree.ROOMS


def test_the_core_does_not_know_torch():
    wrong = []
    for path in library_files():
        if tree.room_of(path) in tree.CORE:
            text = tree.read(path)
            wrong += [path for word in ("<torch/", "<ATen/", "<c10/") if word in text]
    assert not wrong


def test_headers_include_without_cycles():
    graph = {p: tree.includes(p) for p in library_files() if p.endswith(".h")}
    list(TopologicalSorter(graph).static_order())


def test_every_included_header_exists():
    known = set(tree.tracked())
    missing = [
        f"{path}: {header}"
        for path in tree.files(".h", ".cpp")
        for header in tree.includes(path)
        if header not in known
    ]
    assert not missing


def test_no_header_is_an_orphan():
    used = {h for p in tree.files(".h", ".cpp") for h in tree.includes(p)}
    headers = [p for p in library_files() if p.endswith(".h")]
    assert not [p for p in headers if p not in used]


def test_headers_are_guarded_and_sources_include_their_own_first():
    wrong = [p for p in library_files() if p.endswith(".h") and "#pragma once" not in tree.read(p)]
    known = set(tree.tracked())
    for path in library_files():
        own = path.removesuffix(".cpp") + ".h"
        if path.endswith(".cpp") and own in known:
            first = next(line for line in tree.read(path).splitlines() if line.startswith("#incl"))
            if own not in first:
                wrong.append(path)
    assert not wrong


def test_python_package_imports_only_the_extension_module():
    """python/libddp must not reach into the source tree."""
    wrong = [
        p
        for p in tree.files(".py", under="python/libddp/")
        if "import tests" in tree.read(p) or "from examples" in tree.read(p)
    ]
    assert not wrong


def reached_from(headers: set[str]) -> set[str]:
    """These headers, and what they include."""
    reached, ahead = set(), sorted(headers)
    while ahead:
        header = ahead.pop()
        if header not in reached:
            reached.add(header)
            ahead += tree.includes(header)
    return reached


def test_installed_are_the_headers_that_docs_name():
    api = tree.read("docs/api.md")
    table = re.search(r"\| header under libddp/ \|.*?\n\n", api, re.S)[0]
    rows = [line.split("|")[1] for line in table.strip().splitlines()]
    named = {f"libddp/{h}" for row in rows for h in re.findall(r"`([\w/]+\.h)`", row)}
    assert len(named) > 10, "the table has another form"
    listed = re.search(r"set\(public_headers\n([^)]*)\)", tree.read("libddp/cmake/Install.cmake"))[
        1
    ]
    assert {f"libddp/{h}" for h in listed.split()} == reached_from(named | {"libddp/libddp.h"})


def test_docs_and_examples_include_public_headers_only():
    listed = re.search(r"set\(public_headers\n([^)]*)\)", tree.read("libddp/cmake/Install.cmake"))[
        1
    ]
    public = {f"libddp/{h}" for h in listed.split()}
    wrong = [
        f"{path}: {header}"
        for path in [
            "README.md",
            *tree.files(".md", under="docs/"),
            *tree.files(".cpp", ".h", ".md", under="examples/"),
            *tree.files(".cpp", under="tests/consume/"),
        ]
        for header in re.findall(r"<(libddp/[\w/]+\.h)>", tree.read(path))
        if header not in public
    ]
    assert not wrong
