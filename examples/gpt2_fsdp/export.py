"""The newest checkpoint as one file of whole weights in Hugging Face's names.

    python export.py --out_dir=out/gpt2_fsdp --to=exports/mine

One process is enough, whatever number of ranks has written the checkpoint. The folder is what
--hf_model=exports/mine reads, and transformers' GPT2LMHeadModel.from_pretrained too. The tokenizer
comes along where the data has one of its own: convert.py --tokenizer=exports/mine takes it.
"""

import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import shards
import torch
import weights
from shared import GPT, GPTConfig, UserError, key, parse, run_script


@dataclass
class ExportSettings:
    out_dir: str = key("out/gpt2_fsdp", "folder of the run")
    to: str = key("out/gpt2_fsdp/export", "folder to write")


def whole(root: Path) -> tuple[dict, GPTConfig, dict[str, torch.Tensor]]:
    """What run.json says, shape, and weights of the newest checkpoint. Raises: UserError."""
    path = shards.newest_folder(root)
    if path is None:
        raise UserError(f"there is no checkpoint in {root}: train one with train_fsdp.py")
    run = shards.read_run(path)
    config = GPTConfig(**run["config"])
    state = GPT(config).state_dict()
    del state["head.weight"]  # tied: it is token.weight
    shards.load_into({"model": state}, path, alone=True)
    return run, config, state


def main(arguments: list[str]) -> int:
    settings = parse(ExportSettings, arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it shall be
    run, config, state = whole(Path(settings.out_dir) / shards.FOLDER)
    folder = weights.save(config, state, Path(settings.to))
    tokenizer = Path(run["options"]["data_dir"]) / "tokenizer.json"
    if tokenizer.exists():
        shutil.copy(tokenizer, folder)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "export.py"))
