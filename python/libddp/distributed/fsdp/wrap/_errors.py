"""The error of what torch refuses as well."""

from libddp.errors import ArgumentError


class NotSupportedError(ArgumentError, NotImplementedError):
    """What torch refuses too, with the class that torch raises."""
