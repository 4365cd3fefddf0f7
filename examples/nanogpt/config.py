"""Settings from the command line: `--key=value`, typed by each key's default in a dataclass.

    @dataclass
    class Settings:
        n_layer: int = key(4, "transformer blocks")

    settings = parse(Settings, ["--config=small.json", "--n_layer=2"])

Later arguments win, so a flag after `--config=FILE.json` overrides the file. An unknown key or a
value of the wrong type raises UserError with one line that says what to write instead.
"""

import dataclasses
import difflib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


class UserError(Exception):
    """A mistake the user can put right; shown as one line, without a traceback."""


class HelpWanted(Exception):
    """`--help` was given; the message is the text to print."""


def key(default, doc: str):
    """A dataclass field that carries its own line of documentation."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def parse(settings: type, arguments: list[str]):
    """Return an instance of the dataclass `settings`, filled from `arguments`."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    values = {}
    for argument in arguments:
        if argument in ("-h", "--help"):
            raise HelpWanted(describe(settings))
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not equals:
            raise UserError(f"cannot read {argument!r}: settings are written --key=value")
        if name == "config":
            values.update(_read_file(Path(text), fields))
        else:
            values[name] = _convert(_find(name, fields, f"--{name}"), text)
    return settings(**values)


def describe(settings: type) -> str:
    """The text of `--help`: one line per key with its default."""
    lines = ["settings, each as --key=value (or a JSON object in --config=FILE.json):"]
    for field in dataclasses.fields(settings):
        default = str(field.default).encode("unicode_escape").decode()
        name = f"--{field.name}={default}"
        lines.append(f"  {name:<36} {field.metadata['doc']}")
    return "\n".join(lines)


def _find(name: str, fields: dict, where: str):
    if name in fields:
        return fields[name]
    near = difflib.get_close_matches(name, fields, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists the keys"
    raise UserError(f"{where}: there is no key {name!r}; {hint}")


def _read_file(path: Path, fields: dict) -> dict:
    """Values of a JSON file; each must have the type of its key's default."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config={path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--config={path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config={path}: expected a JSON object of keys and values")
    values = {}
    for name, value in content.items():
        field = _find(name, fields, f"--config={path}")
        # A JSON value is judged by its text, so "4" and 4 are the same but 4.5 is not an int.
        values[name] = _convert(field, value if isinstance(value, str) else json.dumps(value))
    return values


def _convert(field, text: str):
    """`text` as the type of the key's default. bool comes first: it is also an int in Python."""
    kind = type(field.default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError) as error:
        wanted = {bool: "True or False", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"--{field.name}={text}: expected {wanted}") from error


def run_script(main: Callable[[list[str]], int], name: str) -> int:
    """Call `main` with the command line; turn a UserError into one line and exit status 1.

    All ranks of a host make the same mistake together, so only the first one speaks. The others
    wait a moment: a launcher that saw them end first would stop the speaker in mid-word.
    """
    try:
        return main(sys.argv[1:])
    except HelpWanted as wanted:
        print(wanted)
        return 0
    except KeyboardInterrupt:  # only in places where nothing is lost, or after a second Ctrl-C
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return 130
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(5)
        return 1
