"""GPT-2's weights in Hugging Face's names and shapes, into our model and back.

    model = pretrained("gpt2", block_size=1024, dropout=0.0)   # from the hub, or its cache
    model = pretrained("exports/mine", ...)      # a folder: config.json, model.safetensors
    save(model.config, model.state_dict(), Path("exports/mine"))

GPT-2 keeps the matrices of its linear maps as [in, out] ("Conv1D"); torch's Linear has [out, in],
so they are transposed. The output layer is the token embedding itself and stands in no file.
"""

import difflib
import json
import os
import re
from pathlib import Path

import torch
from hub import HubError, fetch
from shared import GPT, GPTConfig, UserError

HUB = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ALTERNATIVES = (
    "a folder with config.json and model.safetensors, or a .safetensors file, needs no hub"
)
#: Hugging Face's name of a module outside and inside of a block, and ours.
OUTER = {"wte": "token", "wpe": "position", "ln_f": "norm"}
INNER = {
    "ln_1": "norm_1",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "norm_2",
    "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.out",
}
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask of old files


def pretrained(source: str, block_size: int, dropout: float) -> GPT:
    """A model with the weights of `source`. Raises: UserError, naming the file and the tensor."""
    files, description = find(source)
    tensors = {}
    for path in files:
        tensors |= _read(path)
    weights = rename(tensors, source)
    config = _config(weights, description, source)
    _shorten(weights, config, block_size, source)
    config.block_size, config.dropout = block_size, dropout
    with torch.device("meta"):  # random weights would only be thrown away
        model = GPT(config)
    _check_names(model, weights, source)
    model.load_state_dict(weights | {"head.weight": weights["token.weight"]}, assign=True)
    model.head.weight = model.token.weight
    return model


def find(source: str) -> tuple[list[Path], dict]:
    """The files of `source` and what its config.json says, if there is one. Raises: UserError."""
    path = Path(source)
    if path.is_file():
        return [path], _json(path.parent / CONFIG)
    if path.is_dir():
        return _in_folder(path), _json(path / CONFIG)
    if source in HUB:
        fetched = [_fetch(source, name) for name in (FILE, CONFIG)]
        return fetched[:1], _json(fetched[1])
    near = difflib.get_close_matches(source, HUB, n=1)
    hint = f"did you mean {near[0]}?" if near else f"names are {', '.join(HUB)}; {ALTERNATIVES}"
    raise UserError(f"--hf_model={source}: no such name, folder or file; {hint}")


def _in_folder(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        return sorted({folder / name for name in _json(folder / INDEX)["weight_map"].values()})
    if (folder / FILE).exists():
        return [folder / FILE]
    raise UserError(
        f"--hf_model={folder}: there is no {FILE} in it; transformers' save_pretrained() writes it"
    )


def _fetch(name: str, file: str) -> Path:
    try:
        return fetch(HUB[name], file)
    except HubError as error:
        raise UserError(
            f"--hf_model={name}: cannot fetch {file} of {HUB[name]}: {error}; {ALTERNATIVES}"
        ) from error


def _json(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read it: {error}") from error


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError("--hf_model needs safetensors: pip install 'libddp[gpt2]'") from error
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {error}") from error


def rename(tensors: dict[str, torch.Tensor], source: str) -> dict[str, torch.Tensor]:
    """Our names and shapes, in float32. Raises: UserError for a tensor that GPT-2 does not have."""
    weights, output = {}, None
    for theirs, tensor in tensors.items():
        name = theirs.removeprefix("transformer.")
        if name == "lm_head.weight":
            output = tensor
        elif not MASK.fullmatch(name):
            ours = _our_name(name)
            if ours is None:
                raise UserError(f"--hf_model={source}: {theirs}: GPT-2 has no such tensor")
            turned = tensor.dim() == 2 and name.startswith("h.")
            weights[ours] = (tensor.t() if turned else tensor).float().contiguous()
    if output is not None and not torch.equal(output.float(), weights["token.weight"]):
        raise UserError(
            f"--hf_model={source}: lm_head.weight differs from wte.weight; in GPT-2 they are one"
        )
    return weights


def _our_name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    block = re.fullmatch(r"h\.(\d+)\.(.+)", stem)
    if block and block[2] in INNER:
        return f"blocks.{block[1]}.{INNER[block[2]]}.{kind}"
    return None


def _config(weights: dict, description: dict, source: str) -> GPTConfig:
    """The shape. Only the number of heads cannot be seen in the tensors."""
    for name in ("token.weight", "position.weight"):
        if name not in weights:
            raise UserError(f"--hf_model={source}: there is no tensor for {name} in it")
    (vocab_size, width), places = weights["token.weight"].shape, len(weights["position.weight"])
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    heads = description.get("n_head", width // 64)  # 64 wide in every GPT-2
    if not heads or width % heads:
        raise UserError(
            f"--hf_model={source}: a width of {width} does not divide into {heads} heads; "
            "a config.json beside the file says how many there are (n_head)"
        )
    return GPTConfig(vocab_size, places, len(blocks), heads, width, bias=True, gelu="tanh")


def _shorten(weights: dict, config: GPTConfig, block_size: int, source: str) -> None:
    if block_size > config.block_size:
        raise UserError(
            f"--block_size={block_size}: {source} has learned {config.block_size} positions"
        )
    weights["position.weight"] = weights["position.weight"][:block_size].clone()


def _check_names(model: GPT, weights: dict, source: str) -> None:
    """Every tensor there, in its shape; the first that is not is named."""
    for name, parameter in model.named_parameters():
        if name not in weights:
            raise UserError(f"--hf_model={source}: there is no tensor for {name} in it")
        if weights[name].shape != parameter.shape:
            raise UserError(
                f"--hf_model={source}: {name} is {list(weights[name].shape)} instead of "
                f"{list(parameter.shape)}"
            )


def their_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of rename()."""
    outer, inner = ({o: t for t, o in names.items()} for names in (OUTER, INNER))
    renamed = {}
    for name, tensor in weights.items():
        if name == "head.weight":
            continue
        stem, _, kind = name.rpartition(".")
        if stem in outer:
            renamed[f"{outer[stem]}.{kind}"] = tensor.contiguous()
            continue
        _, number, stem = stem.split(".", 2)
        turned = tensor.t() if tensor.dim() == 2 else tensor
        renamed[f"h.{number}.{inner[stem]}.{kind}"] = turned.contiguous()
    return renamed


def save(config: GPTConfig, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write what pretrained() and transformers read; config.json last. Raises: UserError."""
    from safetensors.torch import save_file

    if not config.bias:
        raise UserError(f"{folder}: GPT-2 has biases, this network (--bias=False) has none")
    description = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    description |= {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    description |= {"vocab_size": config.vocab_size, "n_positions": config.block_size}
    description |= {"activation_function": "gelu_new" if config.gelu == "tanh" else "gelu"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(their_names(weights), folder / (FILE + ".new"), metadata={"format": "pt"})
        (folder / (FILE + ".new")).chmod(0o644)  # safetensors writes for the owner only
        os.replace(folder / (FILE + ".new"), folder / FILE)
        fresh = folder / (CONFIG + ".new")
        fresh.write_text(json.dumps(description, indent=2), encoding="utf-8")
        os.replace(fresh, folder / CONFIG)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}") from error
    return folder
