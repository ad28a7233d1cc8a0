"""Reading a checkpoint file, with one clear error for each way in which it can be none.

torch.load answers a damaged or foreign file with a dozen kinds of exceptions, some of a page's length, and a flipped
bit in a weight with nothing at all. Here a file is looked at before it is unpickled.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor

from lit_cond.errors import CheckpointFileError

__all__ = ["read_checkpoint"]

_VERSION_KEY = "pytorch-lightning_version"
_PARTS = ("hyper_parameters", "callbacks")
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_KINDS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "a gzip archive: unpack it first",
    b"version https://git-lfs": "a pointer of Git LFS: run git lfs pull",
}
# What every pickle of tensors imports.
_USUAL = ("torch._utils.", "torch.storage.", "collections.OrderedDict", "numpy.")
_DAMAGED = "it was cut off or damaged; take an earlier checkpoint or copy it again"


def read_checkpoint(
    path: str | Path,
    *,
    mmap: bool = False,
    weights_only: bool = True,
    map_location: str | torch.device | Callable[..., Any] | None = "cpu",
) -> dict[str, Any]:
    """Read a checkpoint of Lightning; the file stays as it is, and nothing in it is executed.

    Args:
        path: The file; a URL is read the way Lightning reads it.
        mmap: Map the tensors into memory instead of reading them, for looking at what surrounds the weights. Their
            checksums are then not checked, nor are those of a file that was saved without any.
        weights_only: Unpickle tensors and plain values only. False executes what the file says: for trusted files.
        map_location: Where tensors go, as in `torch.load`.

    Returns:
        The checkpoint.

    Raises:
        CheckpointFileError: If there is no such file, or it is empty, cut off, damaged, of another kind, holds
            something that would have to be executed, or was not written by Lightning.
    """
    if "://" in str(path):
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        return _checked(TorchCheckpointIO().load_checkpoint(path, map_location, weights_only), path)  # type: ignore[arg-type]
    file = Path(path)
    _look(file, whole=not mmap)
    try:
        # Only zip files can be mapped; those of torch before 1.6 are a row of pickles.
        value = torch.load(file, map_location, weights_only=weights_only, mmap=mmap and zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        _refuse_pickle(file, error)
    except Exception as error:  # what torch raises for a damaged file is of a dozen types
        raise CheckpointFileError(
            f"'{path}' is not a checkpoint that can be read: {_DAMAGED} ({_line(error)})"
        ) from error
    return _checked(value, path)


def _look(file: Path, *, whole: bool) -> None:
    """Raise unless a file could be what torch.save has written.

    Args:
        file: The file.
        whole: Whether to compare what it holds with its checksums.
    """
    if file.is_dir():
        raise CheckpointFileError(f"'{file}' is a folder, not a checkpoint: give the path of a file in it")
    if not file.is_file():
        raise CheckpointFileError(f"there is no checkpoint '{file}'")
    with file.open("rb") as stream:
        start = stream.read(64)
    if not start:
        raise CheckpointFileError(f"'{file}' is not a checkpoint but an empty file: take an earlier checkpoint")
    if not zipfile.is_zipfile(file):
        if start.startswith(_ZIP):
            raise CheckpointFileError(f"'{file}' is not a whole checkpoint: {_DAMAGED}")
        if not start.startswith(_PICKLE):
            raise CheckpointFileError(f"'{file}' is not a checkpoint that torch.save has written but {_kind(start)}")
        return
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            # Without checksums, by an option of torch, all of them are zero.
            damaged = archive.testzip() if whole and any(info.CRC for info in archive.infolist()) else None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise CheckpointFileError(f"'{file}' is not a whole checkpoint: {_DAMAGED} ({_line(error)})") from error
    if not any(re.fullmatch(r"[^/]+/data\.pkl", name) for name in names):
        raise CheckpointFileError(f"'{file}' is not a checkpoint that torch.save has written but another zip archive")
    if any(re.fullmatch(r"[^/]+/constants\.pkl", name) for name in names):
        raise CheckpointFileError(f"'{file}' is not a checkpoint but a model of TorchScript: torch.jit.load reads it")
    if damaged is not None:
        raise CheckpointFileError(f"'{file}' is damaged: '{damaged}' in it does not match its checksum; copy it again")


def _kind(start: bytes) -> str:
    """Say what a file seems to be, by its first bytes."""
    for magic, kind in _KINDS.items():
        if start.startswith(magic):
            return kind
    if start[8:9] == b"{" and start[4:8] == bytes(4):
        return "a safetensors file: model.load_state_dict(safetensors.torch.load_file(path)) loads it"
    if start.isascii() and not re.search(rb"[\x00-\x08\x0e-\x1f]", start):
        return f"text that begins with {start.decode().splitlines()[0][:20]!r}"
    return f"something that begins with the bytes {start[:4].hex(' ')}"


def _refuse_pickle(file: Path, error: pickle.UnpicklingError) -> NoReturn:
    text = str(error)
    found = re.search(r"GLOBAL (\S+) (?:was|whose)", text)
    # Of a pickle that torch.save has not written, torch names no more than an instruction that it does not know.
    called = found[1] if found else next((name for name in _called_by(file) if not name.startswith(_USUAL)), None)
    if called is None:
        found = re.search(r"WeightsUnpickler error:\s*(\S.*)", text)
        reason = found[1].strip() if found else _line(error)
        raise CheckpointFileError(f"'{file}' is not a checkpoint of tensors and plain values ({reason})") from None
    raise CheckpointFileError(
        f"'{file}' is not a checkpoint of tensors and plain values: unpickling it would call {called}, which was not "
        "done; only if you trust the file, read it with weights_only=False"
    ) from None


def _called_by(file: Path) -> Iterator[str]:
    """Yield the names that a pickle imports, by reading its instructions."""
    texts: list[str] = []
    with file.open("rb") as stream, suppress(ValueError, IndexError):
        for instruction, argument, _ in pickletools.genops(stream):
            if instruction.name == "GLOBAL":
                yield ".".join(str(argument).split(" "))
            elif instruction.name == "STACK_GLOBAL":
                yield ".".join(texts[-2:])
            elif isinstance(argument, str):
                texts.append(argument)


def _checked(value: Any, path: str | Path) -> dict[str, Any]:
    """Return what a file holds if it is a checkpoint of Lightning."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointFileError(f"'{path}' holds {_described(value)}, not a checkpoint of Lightning")
    if isinstance(value.get("state_dict"), Mapping) and isinstance(value.get(_VERSION_KEY), str):
        for key in _PARTS:
            if key in value and isinstance(value[key], (NoneType, str, int, float, list, tuple, Tensor)):
                raise CheckpointFileError(f"'{path}' is damaged: its '{key}' is {_described(value[key])}; {_DAMAGED}")
        if not re.match(r"\d+\.\d+", value[_VERSION_KEY]):
            raise CheckpointFileError(f"'{path}' is damaged: {value[_VERSION_KEY]!r} is no version; {_DAMAGED}")
        return dict(value)
    if value and all(isinstance(item, Tensor) for item in value.values()):
        raise CheckpointFileError(
            f"'{path}' holds a bare state_dict ({next(iter(value))!r}, ...), not a checkpoint of Lightning: load it "
            "with model.load_state_dict(torch.load(path, weights_only=True))"
        )
    missing = "state_dict" if not isinstance(value.get("state_dict"), Mapping) else _VERSION_KEY
    keys = ", ".join(repr(key) for key in list(value)[:4]) or "nothing"
    raise CheckpointFileError(
        f"'{path}' is not a checkpoint of Lightning: it holds {keys} and no {missing!r}; find the weights in "
        "torch.load(path, weights_only=True) and give them to model.load_state_dict"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a value of the type {type(value).__name__}"


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
