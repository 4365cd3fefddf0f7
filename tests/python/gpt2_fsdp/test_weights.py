"""GPT-2's weights as Hugging Face stores them: the same logits, and every fault named."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from gpt2_runs import example

safetensors = pytest.importorskip("safetensors.torch")
gpt2 = example()
UserError, pretrained = gpt2.shared.UserError, gpt2.weights.pretrained
LAYERS, HEADS, WIDTH, VOCABULARY, PLACES = 2, 2, 16, 40, 12


def tensors() -> dict[str, torch.Tensor]:
    """A tiny GPT-2 in Hugging Face's names; linear maps are [in, out]."""
    draw = torch.Generator().manual_seed(5)

    def of(*shape):
        return torch.randn(*shape, generator=draw) * 0.3

    made = {"wte.weight": of(VOCABULARY, WIDTH), "wpe.weight": of(PLACES, WIDTH)}
    made |= {"ln_f.weight": of(WIDTH), "ln_f.bias": of(WIDTH)}
    for layer in range(LAYERS):
        for name, (rows, columns) in {
            "attn.c_attn": (WIDTH, 3 * WIDTH),
            "attn.c_proj": (WIDTH, WIDTH),
            "mlp.c_fc": (WIDTH, 4 * WIDTH),
            "mlp.c_proj": (4 * WIDTH, WIDTH),
        }.items():
            made[f"h.{layer}.{name}.weight"] = of(rows, columns)
            made[f"h.{layer}.{name}.bias"] = of(columns)
        for name in ("ln_1", "ln_2"):
            made[f"h.{layer}.{name}.weight"], made[f"h.{layer}.{name}.bias"] = of(WIDTH), of(WIDTH)
    return made


def reference(w: dict, tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2's forward as its paper and code have it, from the stored tensors."""

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(
            x.var(-1, correction=0, keepdim=True) + 1e-5
        )
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    time = tokens.size(1)
    hidden = torch.ones(time, time, dtype=torch.bool).triu(1)
    x = w["wte.weight"][tokens] + w["wpe.weight"][:time]
    for layer in range(LAYERS):
        parts = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").split(WIDTH, -1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(WIDTH / HEADS)).masked_fill(hidden, -1e9)
        mixed = (F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
        x = x + linear(mixed, f"h.{layer}.attn.c_proj")
        up = gelu(linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc"))
        x = x + linear(up, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def write(folder, made: dict, **config):
    folder.mkdir(exist_ok=True)
    safetensors.save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"n_head": HEADS} | config))
    return folder


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens, tokens)[0]


TOKENS = torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))


def test_logits_are_those_of_gpt2(tmp_path):
    made = tensors()
    folder = write(tmp_path / "plain", made)
    model = pretrained(str(folder), block_size=8, dropout=0.0)
    torch.testing.assert_close(logits(model, TOKENS), reference(made, TOKENS), atol=1e-5, rtol=1e-5)
    assert model.head.weight is model.token.weight
    assert model.position.weight.shape == (8, WIDTH)  # cut to --block_size
    of_file = pretrained(str(folder / "model.safetensors"), 8, 0.0)
    assert torch.equal(logits(of_file, TOKENS), logits(model, TOKENS))


def test_other_spellings_of_the_same_weights(tmp_path):
    made = tensors()
    longer = {f"transformer.{name}": tensor for name, tensor in made.items()}
    longer["lm_head.weight"] = made["wte.weight"].clone()
    longer["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    longer["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    one = pretrained(str(write(tmp_path / "one", made)), 8, 0.0)
    other = pretrained(str(write(tmp_path / "other", longer)), 8, 0.0)
    assert torch.equal(logits(one, TOKENS), logits(other, TOKENS))


def test_several_files_with_an_index(tmp_path):
    made = tensors()
    names = sorted(made)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors.save_file({n: made[n] for n in part}, tmp_path / file)
    where = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps({"n_head": HEADS}))
    model = pretrained(str(tmp_path), 8, 0.0)
    torch.testing.assert_close(logits(model, TOKENS), reference(made, TOKENS), atol=1e-5, rtol=1e-5)


def test_there_and_back(tmp_path):
    made = tensors()
    model = pretrained(str(write(tmp_path / "in", made)), PLACES, 0.0)
    gpt2.weights.save(model.config, model.state_dict(), tmp_path / "out")
    back = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == made.keys()
    assert all(torch.equal(back[name], made[name]) for name in made)
    again = pretrained(str(tmp_path / "out"), PLACES, 0.0)
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))


def test_transformers_agrees(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": PLACES}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, **shape)
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours = pretrained(str(tmp_path), 8, 0.0)
    with torch.no_grad():
        wanted = theirs(TOKENS).logits
    torch.testing.assert_close(logits(ours, TOKENS), wanted, atol=1e-5, rtol=1e-5)


def without(name):
    return {key: tensor for key, tensor in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("made", "config", "message"),
    [
        (without("h.1.mlp.c_fc.bias"), {}, "no tensor for blocks.1.feed_forward.up.bias in it"),
        (without("wte.weight"), {}, "no tensor for token.weight in it"),
        (tensors() | {"h.0.rotary.weight": torch.ones(2)}, {}, "h.0.rotary.weight: GPT-2 has no"),
        (tensors() | {"ln_f.weight": torch.ones(3)}, {}, "norm.weight is [3] instead of [16]"),
        (
            tensors() | {"lm_head.weight": torch.ones(VOCABULARY, WIDTH)},
            {},
            "lm_head.weight differs from wte.weight",
        ),
        (tensors(), {"n_head": 3}, "a width of 16 does not divide into 3 heads"),
    ],
)
def test_files_that_are_no_gpt2(tmp_path, made, config, message):
    folder = write(tmp_path / "bad", made, **config)
    with pytest.raises(UserError, match=re.escape(message)):
        pretrained(str(folder), 8, 0.0)


def test_a_learned_tokenizer_does_not_fit(data, tmp_path):
    meta = json.loads((data / "meta.json").read_text())
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    meta["tokenizer"] = {"kind": "learned BPE", "words": ""}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="learned from the text, and gpt2 knows only its own"):
        gpt2.train_fsdp.main(["--hf_model=gpt2", f"--data_dir={tmp_path}", f"--out_dir={tmp_path}"])


def test_mistakes_about_the_source(tmp_path, monkeypatch):
    def unreachable(repository, file):
        raise gpt2.hub.HubError("no network")

    monkeypatch.setattr(gpt2.weights, "fetch", unreachable)
    with pytest.raises(
        UserError, match=r"cannot fetch model.safetensors of .*no network; a folder"
    ):
        pretrained("gpt2-xl", 8, 0.0)
    with pytest.raises(UserError, match=r"--hf_model=gpt2-medum: .* did you mean gpt2-medium\?"):
        pretrained("gpt2-medum", 8, 0.0)
    with pytest.raises(UserError, match=r"there is no model.safetensors in it"):
        pretrained(str(tmp_path), 8, 0.0)
    folder = write(tmp_path / "short", tensors())
    with pytest.raises(UserError, match=r"--block_size=13: .* has learned 12 positions"):
        pretrained(str(folder), 13, 0.0)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors: not a whole safetensors file"):
        pretrained(str(folder), 8, 0.0)
