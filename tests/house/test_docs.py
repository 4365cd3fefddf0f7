"""Documents point at things that exist."""

import re
from pathlib import PurePosixPath

import pytest
import tree

LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")
ROOTS = "libddp|bindings|python|examples|tests|docs"
#: A lambda of C++ looks like a link.
CODE = re.compile(r"^```.*?^```$|<!--.*?-->", re.M | re.S)
NAMED_FILE = re.compile(rf"`((?:{ROOTS})/[A-Za-z0-9_./-]+\.[a-z]+)`")


@pytest.mark.parametrize("path", tree.files(".md"))
def test_links_and_named_files_exist(path):
    text = tree.read(path)
    folder = PurePosixPath(path).parent
    missing = []
    for target in LINK.findall(CODE.sub("", text)):
        if "://" not in target and not (tree.ROOT / folder / target).exists():
            missing.append(target)
    missing += [name for name in NAMED_FILE.findall(text) if not (tree.ROOT / name).exists()]
    assert not missing


def test_scripts_named_in_the_readme_exist():
    commands = re.findall(r"bash ([a-z_/]+\.sh)", tree.read("README.md"))
    assert {"examples/quickstart.sh", "tests/run.sh"} <= set(commands)
    assert all((tree.ROOT / command).is_file() for command in commands)
