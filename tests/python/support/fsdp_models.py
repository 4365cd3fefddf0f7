"""A small transformer for the tests of sharding, and what trains it."""

import functools

import ddp_models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    """Attention over a short sequence and an MLP, as in GPT-2."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.attention(self.norm_1(x)).chunk(3, dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(y))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class TinyGpt(nn.Module):
    """Tied embedding and head; returns (logits, loss)."""

    def __init__(self, layers=3, width=12, vocabulary=13, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def libddp_fsdp():
    """libddp's package; imported on the ranks only."""
    import libddp.distributed.fsdp as package

    return package


def faces():
    """Both faces of sharding, and fully_shard with plain parameters: functions of a module."""
    package = libddp_fsdp()
    return (
        package.FullyShardedDataParallel,
        package.fully_shard,
        lambda module: package.fully_shard(module, use_dtensor=False),
    )


def on_meta(make_model=TinyGpt):
    """On the meta device."""
    with torch.device("meta"):
        return make_model()


def reset(module):
    """For `apply`: a module's own initialisation, if it has one."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def policy():
    """Every Block is a unit."""
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def build(make_model=TinyGpt, seed=17):
    """The same values on every rank."""
    torch.manual_seed(seed)
    return make_model()


def wrap(model=None, **arguments):
    """`model`, or a TinyGpt, under libddp's FSDP1 class, a unit per block."""
    arguments.setdefault("auto_wrap_policy", policy())
    return libddp_fsdp().FullyShardedDataParallel(build() if model is None else model, **arguments)


def shard(model=None, **arguments):
    """`model`, or a TinyGpt, under libddp's fully_shard, a unit per block."""
    model = build() if model is None else model
    for block in model.blocks:
        libddp_fsdp().fully_shard(block, **arguments)
    return libddp_fsdp().fully_shard(model, **arguments)


def shard_plain(model=None, **arguments):
    """shard() with parameters that are plain tensors."""
    return shard(model, use_dtensor=False, **arguments)


def theirs(model=None, parts=None, mesh=None, **arguments):
    """`model`, or a TinyGpt, under torch's FSDP2 on Gloo, a unit per block or per one of `parts`.

    One of the parts may be a list of modules, which are one unit.
    """
    model = build() if model is None else model
    for part in model.blocks if parts is None else parts:
        theirs_of(part, mesh, **arguments)
    return theirs_of(model, mesh, **arguments)


def theirs_of(part, mesh=None, **arguments):
    """torch's fully_shard of one unit, on Gloo."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or dist.DeviceMesh.from_group(ddp_models.gloo(), "cpu")
    return fully_shard(part, mesh=mesh, **arguments)


def two_by_two():
    """Parameters divided by two, for each half of the ranks."""
    return dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2))


def wrap_hybrid(model=None):
    """wrap() with HYBRID_SHARD."""
    strategy = libddp_fsdp().ShardingStrategy.HYBRID_SHARD
    return wrap(model, sharding_strategy=strategy, device_mesh=two_by_two())


def shard_hybrid(model=None, **arguments):
    """shard() over a mesh of two dimensions."""
    return shard(model, mesh=two_by_two(), **arguments)


def shard_plain_hybrid(model=None):
    """The same with parameters that are plain tensors."""
    return shard_hybrid(model, use_dtensor=False)


def tokens(step, vocabulary=13):
    """A batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(vocabulary, (2, 6), generator=generator)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def train(model, steps, make_optimizer=adamw, each_step=None, first=0):
    """Losses of this rank."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(tokens(step))[1]
        loss.backward()
        if each_step:
            each_step(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole_parameters(model):
    """Of a sharded model, ours or torch's FSDP2, by name; a collective."""
    return _whole(model, lambda parameter: parameter.detach())


def plain_names(named):
    """Values by the names from before wrapping."""
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in named}


def whole_gradients(model):
    """Of the parameters that have some, by name; a collective."""
    return _whole(model, lambda parameter: parameter.grad)


def _whole(model, what):
    from libddp.distributed.fsdp.state._shard_specs import shard_specs_of

    specs, found = shard_specs_of(model), {}
    for name, parameter in plain_names(model.named_parameters()).items():
        tensor = what(parameter)
        if hasattr(tensor, "full_tensor"):
            found[name] = tensor.full_tensor().clone()
        elif tensor is not None:
            spec = specs.get(id(parameter))
            found[name] = tensor.clone() if spec is None else spec.gather(tensor)
    return found


def assert_same_dtensors(ours, theirs):
    """Parameters, their gradients and state dicts, to the bit."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert mine.placements == other.placements, name
        assert mine.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names, name
        assert torch.equal(mine.to_local(), other.to_local()), name
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
    mine, other = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(other)
    for name, value in other.items():
        assert torch.equal(mine[name].full_tensor(), value.full_tensor()), name
