"""Nothing that runs beside torch uses std::filesystem: base/files.h says why.

The libtorch of torch 2.11 exports symbols of an older one; a process calls them in the place of its
own.
"""

import re

import tree

#: Of a program without torch.
ALLOWED = "tests/bench/mpi_store.cpp"
USE = re.compile(r"^\s*#\s*include\s*<filesystem>|\bstd::filesystem::", re.MULTILINE)


def test_nothing_beside_torch_uses_it():
    files = set(tree.files(".cpp", ".h")) - {ALLOWED}
    assert files
    assert not [path for path in files if USE.search(tree.read(path))]


def test_the_pattern_finds_what_it_should():
    assert USE.search("#include <filesystem>")
    assert USE.search("  std::filesystem::remove_all(path);")
    assert not USE.search("// Not std::filesystem: see below")
