"""The newest checkpoint as one file of whole weights in Hugging Face's names.

    python export.py --out_dir=out/gpt2_fsdp --to=exports/mine

One process is enough, whatever number of ranks has written the checkpoint. The folder is what
--hf_model=exports/mine reads, and transformers' GPT2LMHeadModel.from_pretrained too.
"""

import sys
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


def whole(root: Path) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """Shape and weights of the newest checkpoint in `root`. Raises: UserError."""
    path = shards.newest_folder(root)
    if path is None:
        raise UserError(f"there is no checkpoint in {root}: train one with train_fsdp.py")
    config = GPTConfig(**shards.read_run(path)["config"])
    state = GPT(config).state_dict()
    del state["head.weight"]  # tied: it is token.weight
    shards.load_into({"model": state}, path, alone=True)
    return config, state


def main(arguments: list[str]) -> int:
    settings = parse(ExportSettings, arguments)
    config, state = whole(Path(settings.out_dir) / shards.FOLDER)
    print(weights.save(config, state, Path(settings.to)))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "export.py"))
