"""libddp's own protocol and files hold no pickle: reading what a stranger wrote runs no code."""

import re

import tree

OURS = ("libddp", "python", "bindings")
#: torch's object collectives, which pickle between ranks that have proved themselves, are torch's
#: own functions. The one file named here stands between torch's launcher, which unpickles what it
#: finds in a store, and a stranger: it looks into a pickle with a list of classes.
GUARD = "python/libddp/_rendezvous.py"
ALLOWED = {GUARD}
#: Python's modules for it, and torch.load without weights_only.
PATTERN = re.compile(r"\b(pickle|cloudpickle|dill|marshal|shelve)\b\s*[.(]|import\s+\w*pickle\b")
LOAD = re.compile(r"torch\.load\((?![^)]*weights_only=True)")


def shipped():
    return [p for p in tree.files(".py", ".cpp", ".h") if p.split("/")[0] in OURS]


def test_nothing_of_ours_pickles():
    wrong = [p for p in shipped() if p not in ALLOWED and PATTERN.search(tree.read(p))]
    assert not wrong


def test_the_guard_unpickles_by_its_list_only():
    text = tree.read(GUARD)
    assert not re.search(r"pickle\.loads?\(", text)
    assert len(re.findall(r"\.load\(", text)) == 1
    assert "_StateUnpickler(io.BytesIO(bits)).load()" in text


def test_nothing_of_ours_loads_code_from_a_file():
    assert not [p for p in shipped() if LOAD.search(tree.read(p))]


def test_the_pattern_finds_what_it_should():
    for line in ("import pickle", "pickle.loads(text)", "import cloudpickle", "dill.load(file)"):
        assert PATTERN.search(line), line
    assert not PATTERN.search("torch's object collectives pickle them")
    assert LOAD.search("torch.load(path)")
    assert not LOAD.search("torch.load(path, weights_only=True)")
