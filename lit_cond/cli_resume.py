"""``--ckpt_path``: what the user wrote wins over what the checkpoint remembers, and differences are said.

LightningCLI lets the hyper-parameters in a checkpoint override the configuration and the command line, without
a word, and then the restored optimizer brings back its old learning rate. Here the order is: defaults, then
the checkpoint, then what the user has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from lit_cond.checkpoint_file import read_checkpoint
from lit_cond.errors import CheckpointFileError, ConfigurationError, LitCondWarning
from lit_cond.tasks import Task
from lit_cond.tasks.resume import goes_on, warn_of_lost_weights

__all__ = [
    "CHECKPOINT_DECIDES",
    "KeepGivenOptions",
    "TellLostWeights",
    "checked_path",
    "differences",
    "saved_arguments",
]

CHECKPOINT_DECIDES = ("pretrained",)
"""Arguments that the checkpoint decides: its weights replace trained ones, which need not be fetched again."""

_KEYWORDS = ("best", "last", "hpc", "registry")


def checked_path(ckpt_path: str | None) -> Path | None:
    """Return the local file that ``--ckpt_path`` names.

    Args:
        ckpt_path: A path, a URL, or one of Lightning's keywords.

    Returns:
        The path, or None for a keyword, a URL or a directory (a sharded checkpoint).

    Raises:
        ConfigurationError: It can only be a path, and nothing is there.
    """
    if ckpt_path is None or "://" in ckpt_path or ckpt_path.split(":")[0] in _KEYWORDS:
        return None
    path = Path(ckpt_path)
    if not path.exists():
        raise ConfigurationError(f"ckpt_path: there is no checkpoint {ckpt_path!r}")
    return path if path.is_file() else None


def saved_arguments(path: Path, weights_only: bool = True) -> tuple[str | None, dict[str, Any]]:
    """Read the class and the constructor arguments of the model from a checkpoint.

    Args:
        path: A Lightning checkpoint.
        weights_only: As in `read_checkpoint`.

    Returns:
        The import path of the class (None unless a command line wrote the checkpoint) and the arguments.

    Raises:
        CheckpointFileError: The file is not a checkpoint that can be read.
    """
    try:
        checkpoint = read_checkpoint(path, mmap=True, weights_only=weights_only)
    except CheckpointFileError as error:
        raise CheckpointFileError(f"ckpt_path: {error}") from error
    saved = dict(checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    class_path = saved.pop("_class_path", None)
    return class_path, {key: value for key, value in saved.items() if not key.startswith("_")}


def differences(given: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compare the arguments that the user has written with those of a checkpoint.

    Args:
        given: Arguments written by the user.
        saved: Arguments in the checkpoint.

    Returns:
        For each argument in both whose values differ: the given and the saved value.
    """
    return {
        key: (value, saved[key]) for key, value in given.items() if key in saved and _plain(value) != _plain(saved[key])
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class KeepGivenOptions(Callback):
    """Keep the optimizer options of this run when the optimizer's state is restored from a checkpoint.

    The restored state brings the options of the run that wrote it: learning rate, weight decay, momenta. This
    puts those of this run back; a learning rate that a schedule has moved keeps its place in the schedule.
    Where the schedule can not be moved, a warning says that the checkpoint's learning rate stays.
    """

    def __init__(self) -> None:
        self._given: list[list[dict[str, Any]]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the options before the state is restored."""
        self._given = [[dict(group, params=[]) for group in opt.param_groups] for opt in trainer.optimizers]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back the options that the restored state has changed."""
        for optimizer, given in zip(trainer.optimizers, self._given, strict=True):
            configs = trainer.lr_scheduler_configs
            schedulers = [c.scheduler for c in configs if c.scheduler.optimizer is optimizer]
            for index, (group, options) in enumerate(zip(optimizer.param_groups, given, strict=True)):
                _put_back(index, group, options, schedulers)


class TellLostWeights(Callback):
    """Warn of weights that the checkpoint corrects and this run does not; a task of lit_cond warns by itself."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Compare, after the weights were loaded."""
        if goes_on(pl_module) and not isinstance(pl_module, Task):
            warn_of_lost_weights(pl_module, checkpoint)


def _put_back(index: int, group: dict[str, Any], given: Mapping[str, Any], schedulers: Sequence[LRScheduler]) -> None:
    group.update({key: value for key, value in given.items() if key not in ("params", "lr", "initial_lr")})
    # A schedule moves `lr`, and what the user gave is in `initial_lr`.
    peak = "initial_lr" if "initial_lr" in given else "lr"
    wanted, restored = float(given[peak]), float(group[peak])
    if wanted == restored:
        return
    if any(isinstance(one, (ChainedScheduler, ReduceLROnPlateau, SequentialLR)) for one in schedulers):
        rank_zero_warn(
            f"ckpt_path: lr {wanted:g} is not in force, {type(schedulers[0]).__name__} goes on with "
            f"the checkpoint's {restored:g}: to train with another one, start a new run from the weights",
            category=LitCondWarning,
        )
        return
    if peak == "initial_lr" and restored:
        group["lr"] = float(group["lr"]) * wanted / restored
    group[peak] = wanted
    for scheduler in schedulers:
        scheduler.base_lrs[index] = wanted
