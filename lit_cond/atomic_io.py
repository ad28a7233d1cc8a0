"""Checkpoints that a kill during the write can not damage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from lit_cond.checkpoint_file import read_checkpoint

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["AtomicCheckpointIO"]

_SUFFIX = ".part"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there when it is whole and on the disk.

    Lightning writes into the system's folder of temporary files and moves the file from there: where that is another
    file system the move is a copy, and a kill in it leaves half a checkpoint under the final name. Here the file
    lies in the same folder, is flushed to the disk, and takes its name in one step; until then the previous
    checkpoint of that name is whole. What a killed write has left is removed by the next save into that folder.
    Places that Lightning reaches by a protocol (``s3://``) are written in Lightning's way.

    Example:
        ``Trainer(plugins=[AtomicCheckpointIO()])``; the command line adds it by itself.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            TypeError: If `storage_options` are given.
            OSError: If the file can not be written; the previous one of that name is left as it was.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        with _replacing(target) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; nothing in it is executed unless `weights_only` is False.

        Raises:
            CheckpointFileError: If the file is no checkpoint that can be read, in one line.
        """
        if "://" in str(path) or Path(path).is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        return read_checkpoint(path, map_location=map_location, weights_only=weights_only is not False)


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Give a file beside `target` that takes its place if the block ends well."""
    part = target.with_name(f".{target.name}.{os.getpid()}{_SUFFIX}")
    try:
        with part.open("wb") as file:
            # Held while the process lives: it tells this file from what a killed write has left.
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, target)
    except BaseException as error:
        _name_file(error, target)
        with suppress(OSError):
            part.unlink()
        raise
    _sync_folder(target.parent)


def _name_file(error: BaseException | None, target: Path) -> None:
    """Give errors of writing the name of the file; torch turns them into others."""
    while error is not None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target)
        error = error.__cause__ or error.__context__


def _remove_leftovers(folder: Path) -> None:
    """Remove the parts that no living process writes."""
    if fcntl is None:
        return
    for part in folder.glob(f".*{_SUFFIX}"):
        with suppress(OSError), part.open("rb") as file:
            if _lock(file):
                part.unlink()


def _lock(file: Any) -> bool:
    """Try to lock a file; say whether that worked. The system gives the lock back when the process ends."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another process, or a file system without locks
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk, where a folder can be opened for that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
