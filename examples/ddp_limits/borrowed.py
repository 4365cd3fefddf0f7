"""What this example takes from examples/gpt2_fsdp: the engine, and what that shares with nanogpt.

from borrowed import GPT, engine, parse
"""
# ruff: noqa: E402 (the path comes before what is found on it)

import sys
from pathlib import Path

GPT2_FSDP = Path(__file__).resolve().parents[1] / "gpt2_fsdp"
if str(GPT2_FSDP) not in sys.path:
    sys.path.append(str(GPT2_FSDP))  # behind this folder

import engine
from fsdp_trainer import gather, meet, memory_mib
from shared import GPT, GPTConfig, Ranks, UserError, at_least, key, parse, run_script

__all__ = [
    "GPT",
    "GPTConfig",
    "Ranks",
    "UserError",
    "at_least",
    "engine",
    "gather",
    "key",
    "meet",
    "memory_mib",
    "parse",
    "run_script",
]
