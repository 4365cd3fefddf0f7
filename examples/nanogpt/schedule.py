"""Learning rate by iteration: linear warm-up, then a cosine from the peak down to the minimum.

learning_rate(0, settings)      # the first step is small, but not zero
"""

import math

from settings import TrainSettings


def learning_rate(iteration: int, settings: TrainSettings) -> float:
    """The rate for one iteration; after the decay it stays at min_lr."""
    if iteration < settings.warmup_iters:
        return settings.learning_rate * (iteration + 1) / (settings.warmup_iters + 1)
    if not settings.decay_lr:
        return settings.learning_rate
    end = settings.lr_decay_iters or settings.max_iters
    if iteration >= end:
        return settings.min_lr
    progress = (iteration - settings.warmup_iters) / (end - settings.warmup_iters)
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + height * (settings.learning_rate - settings.min_lr)
