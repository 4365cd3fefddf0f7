"""ElasticTrainer over 1, 2 and 4 ranks: losses, gradients and models are the same.

In float64, where only the order of additions differs: to 1e-13.
"""

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

MICRO_BATCHES, MICRO_BATCH_SIZE, NUM_SAMPLES, EPOCHS = 4, 2, 40, 2
NUM_STEPS = EPOCHS * NUM_SAMPLES // (MICRO_BATCHES * MICRO_BATCH_SIZE)
TOLERANCE = 1e-13


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.linspace(index, index + 1, 6, dtype=torch.float64).sin(), index % 3


def make_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def libddps(model):
    from libddp.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def torchs(model):
    group = dist.new_group(backend="gloo")
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def fsdp(model):
    from libddp.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_sharded(model):
    from libddp.distributed.fsdp import fully_shard

    return fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Training:
    """What a script keeps, and goes on with behind a state of any number of ranks."""

    def __init__(self, wrap="libddps", state=None, average_gradients=True):
        from libddp.elastic import ElasticDataLoader, ElasticDistributedSampler, ElasticTrainer

        self.sampler = ElasticDistributedSampler(Samples())
        self.loader = ElasticDataLoader(Samples(), MICRO_BATCH_SIZE, sampler=self.sampler)
        self.bare = make_model()
        self.model = globals()[wrap](self.bare)
        self.trainer = ElasticTrainer(
            self.model,
            self.loader,
            micro_batches=MICRO_BATCHES,
            average_gradients=average_gradients,
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
        self.optimizer, self.scheduler = self.trainer.prepare(optimizer, scheduler)
        self.divisor = 1 if average_gradients else self.trainer.gradient_accumulation_steps
        if state:
            self.bare.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.sampler.load_state_dict(state["sampler"])

    def run(self, num_steps=NUM_STEPS):
        """(loss, norm of the gradient) of each step."""
        found, losses = [], []
        for epoch in range(self.sampler.epoch, EPOCHS):
            self.sampler.set_epoch(epoch)
            for inputs, targets in self.loader:
                with self.trainer.step(fix_total_batch_size=True):
                    loss = nn.functional.cross_entropy(self.model(inputs), targets)
                    (loss / self.divisor).backward()
                    losses.append(loss.item())
                    is_whole = self.trainer.gradient_state.sync_gradients
                    if is_whole:
                        found.append((mean(losses), self.clip()))
                        losses = []
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if is_whole and len(found) == num_steps:
                    return found
        return found

    def clip(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return float(whole(norm))

    def state(self):
        return {
            "model": {name: value.clone() for name, value in self.bare.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.loader.state_dict(),
        }


def mean(losses):
    """Over micro-steps and ranks."""
    total = torch.tensor(losses, dtype=torch.float64).mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(wrap, average_gradients=True):
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    training = Training(wrap, average_gradients=average_gradients)
    return training.run()


def train_a_part(state, num_steps):
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    training = Training(state=state)
    found = training.run(num_steps)
    return found, training.state()


def is_close(a, b):
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def reference():
    """One rank's large batches, by torch alone."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    sampler = torch.utils.data.DistributedSampler(Samples(), num_replicas=1, rank=0)
    size = MICRO_BATCHES * MICRO_BATCH_SIZE
    found = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in torch.utils.data.DataLoader(Samples(), size, sampler=sampler):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            found.append((loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert len(found) == NUM_STEPS
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("wrap", ["libddps", "torchs", "fsdp"])
def test_steps_are_those_of_one_large_batch(reference, wrap, num_ranks):
    for found in ranks.run(train, num_ranks, wrap):
        assert is_close(found, reference)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_fully_shard_with_a_loss_that_the_script_divides(reference, num_ranks):
    for found in ranks.run(train, num_ranks, "fully_sharded", False):
        assert is_close(found, reference)


def test_fully_shard_is_an_error_and_no_sum():
    for outcome in ranks.launch(train, 2, "fully_sharded"):
        assert outcome.error == "StateError"
        assert "the model takes them past the hooks of its parameters" in outcome.message


def test_ranks_come_and_go(reference):
    found, state = [], None
    for num_ranks, num_steps in ((4, 2), (1, 3), (2, 1), (4, 2), (2, 99)):
        part, state = ranks.run(train_a_part, num_ranks, state, num_steps)[0]
        found += part
    assert is_close(found, reference)
    assert len(found) == NUM_STEPS


def wait_for_others():
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    training = Training()
    gradients = []
    for inputs, targets in training.loader:
        with training.trainer.step(fix_total_batch_size=True):
            nn.functional.cross_entropy(training.model(inputs), targets).backward()
        gradients.append(training.bare[0].weight.grad.clone())
        if len(gradients) == 2:
            return gradients


def test_waiting_gradients_are_this_ranks_own():
    """no_sync: only the last micro-step communicates."""
    (first, first_whole), (second, second_whole) = ranks.run(wait_for_others, 2)
    assert not torch.equal(first, second)
    assert torch.equal(first_whole, second_whole)


def share_unequally():
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    training = Training()
    with training.trainer.step():
        pass  # a step by itself is possible
    with training.trainer.step(fix_total_batch_size=True):
        pass


def test_ranks_that_cannot_share_equally_are_an_error():
    for outcome in ranks.launch(share_unequally, 3):
        assert outcome.error == "ArgumentError"
        assert "4 micro-batches of a step cannot be shared equally among 3 ranks. Hint" in (
            outcome.message
        )
