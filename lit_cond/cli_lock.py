"""One process for each run: a second one that would go on in the same folder is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_cond.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["RunLock", "take_lock"]

_NAME = ".lit_cond.lock"
# By device and number of the file: the folder may be moved.
_held: dict[tuple[int, int], IO[bytes]] = {}


class RunLock(Callback):
    """Marks the folder of a run as taken while this process lives."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the folder; one that another process has taken is left to it, unless the run goes on there."""
        _lock(trainer)


@rank_zero_only
def take_lock(trainer: Trainer) -> None:
    """Take the folder of a run that goes on.

    Args:
        trainer: The trainer, with the versions of the run.

    Raises:
        ConfigurationError: If another process has taken it.
    """
    if not _lock(trainer):
        raise ConfigurationError(
            f"ckpt_path: another process is training in '{os.path.relpath(_folder(trainer) or '.')}' and would be "
            "overwritten: wait for its end, or begin a new run without ckpt_path"
        )


def _lock(trainer: Trainer) -> bool:
    """Lock a file in the folder of the run; say whether no other process holds it."""
    folder = _folder(trainer)
    if fcntl is None or folder is None or rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return True
    path = folder.resolve() / _NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:  # the run itself will say so, or needs no file there
        return True
    status = os.fstat(file.fileno())
    key = status.st_dev, status.st_ino
    if key in _held:
        file.close()
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    except OSError:  # a file system without locks
        file.close()
        return True
    _held[key] = file  # the system gives it back when the process ends
    return True


def _folder(trainer: Trainer) -> Path | None:
    """Return the folder that belongs to the run alone; None where that is not known."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    return Path(logger.log_dir) if isinstance(logger, (CSVLogger, TensorBoardLogger)) else None


def _let_go() -> None:
    """Close the files in a process that was forked: a worker that outlives this one must not hold the run."""
    for file in _held.values():
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
