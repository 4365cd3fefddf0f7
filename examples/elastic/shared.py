"""What this example takes from nanogpt: settings, text and model.

from shared import GPT, Corpus, parse

Two examples that do the same thing do it with the same code; the other modules of this folder
therefore have names that nanogpt's have not.
"""
# ruff: noqa: E402 (the path comes before what is found on it)

import sys
from pathlib import Path

NANOGPT = Path(__file__).resolve().parents[1] / "nanogpt"
if str(NANOGPT) not in sys.path:
    sys.path.append(str(NANOGPT))  # behind this folder

from config import UserError, at_least, key, parse, run_script
from data import Corpus
from model import GPT, GPTConfig
from prepare import prepare

__all__ = [
    "GPT",
    "Corpus",
    "GPTConfig",
    "UserError",
    "at_least",
    "key",
    "parse",
    "prepare",
    "run_script",
]
