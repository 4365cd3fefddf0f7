"""What this example takes from nanogpt: settings, model, schedule, metrics, snapshots, signals.

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

from checkpoint import StopSignal, claim, sync_folder
from config import (
    CommonSettings,
    UserError,
    at_least,
    check_common,
    key,
    need,
    one_of,
    parse,
    run_script,
)
from model import GPT, Attention, Block, FeedForward, GPTConfig
from prepare import standard_library
from report import Metrics, Progress, Stopwatch
from snapshots import Snapshots
from train import Ranks, join, learning_rate

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
    "Snapshots",
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
