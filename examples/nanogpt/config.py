"""Settings from the command line: `--key=value` or `--key value`, typed as in a dataclass.

    @dataclass
    class Settings:
        n_layer: int = key(4, "transformer blocks")
        betas: tuple[float, float] = key((0.9, 0.99), "of AdamW")
        vocab_size: int | None = key(None, "None: that of the data")

    settings = parse(Settings, ["--config=small.json", "--n_layer=2", "--betas", "0.9,0.95"])

Later arguments win, so a flag after `--config=FILE.json` overrides the file. An unknown key or a
value of the wrong type raises UserError with one line that says what to write instead. At the end:
what the training scripts of all examples ask and check alike.
"""

import dataclasses
import difflib
import importlib.util
import json
import os
import sys
import time
import types
import typing
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
    kinds, values = typing.get_type_hints(settings), {}
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-h", "--help"):
            raise HelpWanted(describe(settings))
        name, equals, text = argument.removeprefix("--").partition("=")
        if name != "config" and argument.startswith("--"):
            _check_name(name, kinds, f"--{name}")
        if not equals:
            text = next(rest, "--")
        if not argument.startswith("--") or (not equals and text.startswith("--")):
            raise UserError(
                f"cannot read {argument!r}: settings are written --key=value or --key value"
            )
        if name == "config":
            values.update(_read_file(Path(text), kinds))
        else:
            values[name] = _convert(name, kinds[name], text)
    return settings(**values)


def describe(settings: type) -> str:
    """The text of `--help`: one line per key with its default."""
    lines = ["settings, each as --key=value (or a JSON object in --config=FILE.json):"]
    for field in dataclasses.fields(settings):
        default = _text(field.default).encode("unicode_escape").decode()
        name = f"--{field.name}={default}"
        lines.append(f"  {name:<36} {field.metadata['doc']}")
    return "\n".join(lines)


def _check_name(name: str, kinds: dict, where: str) -> None:
    if name in kinds:
        return
    near = difflib.get_close_matches(name, kinds, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists the keys"
    raise UserError(f"{where}: there is no key {name!r}; {hint}")


def _read_file(path: Path, kinds: dict) -> dict:
    """Values of a JSON file; each must have the type of its key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config={path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--config={path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config={path}: expected a JSON object of keys and values")
    for name in content:
        _check_name(name, kinds, f"--config={path}")
    # A JSON value is judged by its text, so "4" and 4 are the same but 4.5 is not an int.
    return {name: _convert(name, kinds[name], _text(value)) for name, value in content.items()}


def _text(value) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value)


def _convert(name: str, kind, text: str):
    try:
        return _value(kind, text)
    except (KeyError, ValueError) as error:
        raise UserError(f"--{name}={text}: expected {_words(kind)}") from error


def _value(kind, text: str):
    """`text` as a value of `kind`: bool, int, float, str, one of these or None, or a tuple."""
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # X | None
        return None if text.lower() == "none" else _value(parts[0], text)
    if typing.get_origin(kind) is tuple:
        items = [item.strip() for item in text.strip("()").split(",") if item.strip()]
        each = parts[:1] * len(items) if parts[-1] is Ellipsis else parts
        return tuple(_value(k, item) for k, item in zip(each, items, strict=True))
    return kind(text)


def _words(kind) -> str:
    """What `_value` takes for `kind`."""
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return f"{_words(parts[0])} or None"
    if parts and parts[-1] is Ellipsis:
        return f"any number of values, each {_words(parts[0])}, with commas between them"
    if parts:
        return f"{len(parts)} values, each {_words(parts[0])}, with commas between them"
    return {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}[kind]


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


@dataclasses.dataclass
class CommonSettings:
    """What the training scripts of all examples ask alike."""

    learning_rate: float = key(1e-3, "peak learning rate")
    min_lr: float = key(1e-4, "learning rate at the end of the decay")
    decay_lr: bool = key(True, "cosine decay after the warm-up")
    warmup_iters: int = key(20, "iterations of linear warm-up")
    lr_decay_iters: int = key(0, "iteration at which the decay ends; 0: MAX_ITERS")
    weight_decay: float = key(0.1, "weight decay of matrices")
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping")
    snapshot_every: int = key(0, "iterations between snapshots in memory, for restarts; 0: none")
    snapshot_storage: int = key(0, "iterations between those in OUT_DIR/snapshots too; 0: none")
    backend: str = key("auto", "backend of init_process_group: auto, gloo, nccl, ...")
    device: str = key("auto", "cpu, cuda or auto (cuda where there is one)")


def check_common(settings) -> None:
    """Of numbers that every training script has. Raises: UserError."""
    for name in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "max_iters"):
        at_least(settings, name, 1)
    for name in ("gradient_accumulation_steps", "log_interval", "eval_interval", "eval_iters"):
        at_least(settings, name, 1)
    for name in ("seed", "warmup_iters", "lr_decay_iters", "grad_clip", "weight_decay"):
        at_least(settings, name, 0)
    for name in ("snapshot_every", "snapshot_storage"):
        at_least(settings, name, 0)
    if not 0 <= settings.dropout < 1:
        raise UserError(f"--dropout={settings.dropout}: expected 0 <= dropout < 1")
    if settings.n_embd % settings.n_head:
        raise UserError(
            f"--n_embd={settings.n_embd} does not divide into --n_head={settings.n_head} heads"
        )


def need(settings, name: str, package: str, extra: str) -> None:
    """Raises: UserError if the switch `name` is on and `package` is not installed."""
    if getattr(settings, name) and importlib.util.find_spec(package) is None:
        raise UserError(f"--{name}=True needs {package}: pip install 'libddp[{extra}]'")


def one_of(settings, name: str, allowed: tuple) -> None:
    value = getattr(settings, name)
    if value not in allowed:
        raise UserError(f"--{name}={value}: expected one of {', '.join(allowed)}")


def at_least(settings, name: str, least: int) -> None:
    value = getattr(settings, name)
    if value < least:
        raise UserError(f"--{name}={value}: expected at least {least}")
