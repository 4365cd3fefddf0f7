"""What this example takes from examples/nanogpt: settings, model, schedule, metrics, signals.

from shared import GPT, UserError, parse

Two examples that do the same thing do it with the same code; the modules of this folder therefore
have names that nanogpt's have not.
"""
# ruff: noqa: E402 (the path comes before what is found on it)

import sys
from pathlib import Path

NANOGPT = Path(__file__).resolve().parents[1] / "nanogpt"
if str(NANOGPT) not in sys.path:
    sys.path.append(str(NANOGPT))  # behind this folder

from checkpoint import sync_folder
from config import UserError, key, parse, run_script
from metrics import Metrics
from model import GPT, Attention, Block, FeedForward, GPTConfig
from prepare import standard_library
from progress import Progress, Stopwatch
from resume import claim
from schedule import learning_rate
from settings import CommonSettings, at_least, check_common, need, one_of
from stop import StopSignal
from train import join
from trainer import Ranks

__all__ = [
    "GPT",
    "Attention",
    "Block",
    "CommonSettings",
    "FeedForward",
    "GPTConfig",
    "Metrics",
    "Progress",
    "Ranks",
    "Stopwatch",
    "StopSignal",
    "UserError",
    "at_least",
    "check_common",
    "claim",
    "join",
    "key",
    "learning_rate",
    "need",
    "one_of",
    "parse",
    "run_script",
    "standard_library",
    "sync_folder",
]
