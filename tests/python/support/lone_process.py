"""A fixture for conftest.py: this process as if a user had started it; torch as it was."""

import pytest
import torch


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's variables; the caller's random state and threads come back."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # the network is so small that threads would only wait
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
