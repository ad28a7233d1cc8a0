"""The exceptions and warnings of the package: one tree, one line of text each.

Every message says what was wrong with the value received and what to do about it.
"""

__all__ = [
    "AlreadyConditionedError",
    "CheckpointFileError",
    "CheckpointMismatchError",
    "ConfigurationError",
    "DataError",
    "ExportMismatchError",
    "LitCondError",
    "LitCondWarning",
    "LostTargetError",
    "MissingExtraError",
    "NoMatchingTargetError",
    "UnknownAttentionError",
]


class LitCondError(Exception):
    """Base of every error raised on purpose by lit_cond."""


class ConfigurationError(LitCondError, ValueError):
    """An argument has a value that can not be used."""


class NoMatchingTargetError(LitCondError, ValueError):
    """A selection matched no attention layer."""


class UnknownAttentionError(LitCondError, ValueError):
    """A module looks like attention, and the layout of its weights is not known."""


class AlreadyConditionedError(LitCondError, RuntimeError):
    """A weight carries a correction already, or is well conditioned without one."""


class LostTargetError(LitCondError, RuntimeError):
    """A conditioned module was replaced or its weight is no longer a plain parameter."""


class CheckpointMismatchError(LitCondError, RuntimeError):
    """A checkpoint and the model that shall load it do not compute the same function."""


class DataError(LitCondError, ValueError):
    """A file or folder of the user's data set can not be used."""


class CheckpointFileError(DataError):
    """A file is no checkpoint that can be read."""


class ExportMismatchError(LitCondError, RuntimeError):
    """An exported file does not compute what the model computes."""


class MissingExtraError(LitCondError, ImportError):
    """An optional dependency is not installed; the text holds the command that installs it."""


class LitCondWarning(UserWarning):
    """Base of the warnings issued by lit_cond."""
