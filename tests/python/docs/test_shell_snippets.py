"""Shell snippets in README.md and docs: all can be read, and those run that take seconds."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import snippets
from launches import finish

ALL = [s for page in snippets.PAGES for s in snippets.of(page, "bash", "console")]
# What an installation puts beside its interpreter, for that of this process.
COMMANDS = {"python": "", "libddp": "-m libddp", "torchrun": "-m torch.distributed.run"}


def script(snippet: snippets.Snippet) -> str:
    """What a shell is given: without the prompts of a console."""
    return re.sub(r"^\$ ", "", snippet.text, flags=re.M)


def commands(snippet: snippets.Snippet) -> list[tuple[Path, list[str]]]:
    """(folder, words) of each simple command."""
    folder, found = snippets.ROOT, []
    for line in re.split(r"\n|;|&&", script(snippet).replace("\\\n", " ")):
        if line.count("'") % 2 or "$(" in line:
            continue
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words and words[0] == "cd":
            folder = folder / words[1]
        elif words:
            found.append((folder, words))
    return found


@pytest.mark.parametrize("snippet", ALL, ids=lambda s: s.place)
def test_a_shell_can_read_it(snippet):
    done = subprocess.run(["bash", "-n"], input=script(snippet), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run" in snippet.words or snippet.reason, "<!-- test: run --> or <!-- test: not run: -->"


@pytest.mark.parametrize("snippet", ALL, ids=lambda s: s.place)
def test_scripts_and_flags_are_there(snippet):
    from libddp.run import parse

    for folder, words in commands(snippet):
        if words[:2] == ["libddp", "run"] or words[0] == "torchrun":
            flags = [word for word in words[1 + (words[0] == "libddp") :] if word != "..."]
            parse(flags)  # leaves with status 2 for a flag that there is not
        elif words[0] in ("python", "bash") and words[1].endswith((".py", ".sh")):
            place = folder / words[1]
            example = snippets.ROOT / "examples" / Path(snippet.page).stem / words[1]
            assert place.is_file() or example.is_file(), words


@pytest.fixture
def folder(tmp_path):
    """An empty folder with the checkout's examples, and the commands of an installation."""
    (tmp_path / "examples").symlink_to(snippets.ROOT / "examples")
    (tmp_path / "bin").mkdir()
    for name, module in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        command.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("snippet", [s for s in ALL if "run" in s.words], ids=lambda s: s.place)
def test_it_runs(snippet, folder):
    process = subprocess.Popen(
        ["bash", "-eu", "-c", snippet.before + script(snippet)],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    [(status, output)] = finish(process, deadline=180)
    assert status == 0, output
