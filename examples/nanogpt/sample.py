"""Writes text with a trained checkpoint.

python sample.py --out_dir=out/quickstart --start="def main(" --max_new_tokens=300
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import checkpoint
import torch
from config import UserError, key, parse, run_script
from device import choose
from model import GPT, GPTConfig


@dataclass
class SampleSettings:
    out_dir: str = key("out/nanogpt", "folder with the checkpoint")
    start: str = key("\n", "text to continue; FILE:PATH reads it from a file")
    num_samples: int = key(1, "how many samples to print")
    max_new_tokens: int = key(500, "characters per sample")
    temperature: float = key(0.8, "below 1: bolder, above 1: more varied")
    top_k: int = key(200, "choose among this many likeliest characters")
    device: str = key("auto", "cpu, cuda or auto (cuda where there is one)")
    seed: int = key(1337, "random seed")


def continue_text(model: GPT, chars: str, settings: SampleSettings) -> str:
    """Return the start text and what the model adds to it. Raises: UserError (bad start text)."""
    start = settings.start
    if start.startswith("FILE:"):
        start = _read_start(Path(start.removeprefix("FILE:")))
    number = {char: index for index, char in enumerate(chars)}
    unknown = sorted(set(start) - set(number))
    if not start or unknown:
        reason = f"the model has never seen {unknown[0]!r}" if unknown else "the text is empty"
        raise UserError(f"--start: {reason}")
    device = next(model.parameters()).device
    tokens = torch.tensor([[number[char] for char in start]], device=device)
    generator = torch.Generator(device).manual_seed(settings.seed)
    training = model.training
    model.eval()
    out = model.generate(
        tokens, settings.max_new_tokens, settings.temperature, settings.top_k, generator
    )
    model.train(training)
    return "".join(chars[index] for index in out[0].tolist())


def _read_start(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--start=FILE:{path}: cannot read it: {error}") from error


def load_model(folder: Path, device) -> tuple[GPT, str]:
    """Return the model of the newest checkpoint and its characters. Raises: UserError."""
    state = checkpoint.load(folder, device)
    if state is None:
        raise UserError(f"no checkpoint in {folder}: train one with train.py --out_dir={folder}")
    model = GPT(GPTConfig(**state["model_config"]))
    model.load_state_dict(state["model"])
    return model.to(device), state["chars"]


def write_sample(folder: Path, count: int, device) -> str:
    """Return `count` characters by the model in `folder`; they are in its sample.txt too."""
    model, chars = load_model(folder, device)
    start = "\n" if "\n" in chars else chars[0]
    text = continue_text(model, chars, SampleSettings(start=start, max_new_tokens=count))
    (folder / "sample.txt").write_text(text, encoding="utf-8")
    return text


def main(arguments: list[str]) -> int:
    settings = parse(SampleSettings, arguments)
    if settings.temperature <= 0 or settings.top_k < 1:
        raise UserError("--temperature must be above 0 and --top_k at least 1")
    model, chars = load_model(Path(settings.out_dir), choose(settings.device))
    for _ in range(settings.num_samples):
        print(continue_text(model, chars, settings), "---------------", sep="\n")
        settings.seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "sample.py"))
