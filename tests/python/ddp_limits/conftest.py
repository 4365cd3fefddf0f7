"""A process without a launcher's variables."""

from lone_process import alone

__all__ = ["alone"]
