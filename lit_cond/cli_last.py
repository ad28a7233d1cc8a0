"""``fit --ckpt_path last``: the newest run of a job, its last checkpoint, and the versions of its loggers.

Lightning looks for files called ``last*.ckpt`` in the folder of the run that begins, which is a new one. Here the job's
folders are searched, whatever its checkpoints are called.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lit_cond.checkpoint_file import read_checkpoint
from lit_cond.cli_log import ROWS_KEY, logged_step
from lit_cond.errors import CheckpointFileError, ConfigurationError, DataError, LitCondWarning
from lit_cond.runs import find_checkpoint

__all__ = ["LastRun", "find_for_evaluation", "find_last", "tell"]

Version = int | str
_FOUND = "LIT_COND_LAST_CHECKPOINT"
_VERSION_FOLDER = re.compile(r"version_(\d+)")
_RESUME_KEY = "ExactResume"


@dataclass(frozen=True)
class LastRun:
    """Where a run goes on.

    Attributes:
        checkpoint: The most advanced whole checkpoint; None where there is none.
        searched: The folders that were looked into.
        loggers: Specifications of the loggers, with the versions of the run, in the form of the configuration.
        step: The optimizer steps that the checkpoint has behind it.
        epoch: The epoch that it was written in, counted from 0.
        logged: The highest step in the log of the run; -1 where nothing is known of one.
        rows: What `lit_cond.cli_log.LogPlace` has stored.
    """

    checkpoint: Path | None
    searched: tuple[Path, ...]
    loggers: list[dict[str, Any]]
    step: int = 0
    epoch: int = 0
    logged: int = -1
    rows: Sequence[int | None] | None = None


@dataclass(frozen=True)
class _Logger:
    """A logger as the configuration describes it; `root` is None where its folders are not known."""

    class_path: str
    init_args: Mapping[str, Any]
    save_dir: Path
    root: Path | None
    version: Version | None


def find_last(trainer_options: Mapping[str, Any]) -> LastRun:
    """Find the newest run that a trainer with these options has made, and its last checkpoint.

    The newest run is the version folder with the highest number that holds a config.yaml or a checkpoint; where the
    version is fixed, or there is no logger, it is the one folder there is. A run without a checkpoint that was itself
    started with ``--ckpt_path last`` does not count: it is the same job. Checkpoints also count in the `dirpath` of
    callbacks, if this run has written them.

    Args:
        trainer_options: The section `trainer` of the configuration.

    Returns:
        The run. A file that is no whole checkpoint is passed over with a warning, and so is a damaged one, by its
        checksums; one that holds weights alone is passed over with a line.
    """
    base = Path(trainer_options.get("default_root_dir") or Path.cwd())  # as the trainer has it
    loggers = list(_loggers(trainer_options.get("logger"), base))
    folders, version = _run_folders(loggers, base, same_job=True)
    places = _dirpaths(trainer_options.get("callbacks"))
    given = os.environ.get(_FOUND) if os.environ.get("LOCAL_RANK", "0") != "0" else None
    if given:  # by the process that has started this one: later there may be another last checkpoint
        found = [Path(given)]
    else:
        found = [path for folder in folders for path in sorted((folder / "checkpoints").rglob("*.ckpt"))]
        found += [path for place in places for path in sorted(place.rglob("*.ckpt"))]
    states = {path: state for path in dict.fromkeys(found) if (state := _resumable(path)) is not None}
    if version is not None:
        in_run = [path for path in states if _version_of(states[path], 0) in (None, version)]
        states = {path: states[path] for path in in_run}
    searched = tuple(dict.fromkeys([*folders, *places])) or (base,)
    in_order = sorted(states, key=lambda path: (*_progress(states[path]), path.stat().st_mtime_ns), reverse=True)
    last = next((path for path in in_order if _undamaged(path)), None)
    if last is None:
        return LastRun(None, searched, [])
    os.environ[_FOUND] = str(last)
    state = states[last]
    specifications = [_pinned(logger, _version_of(state, k, version)) for k, logger in enumerate(loggers)]
    logs = [_log_folder(logger, _version_of(state, k, version)) for k, logger in enumerate(loggers)]
    logged = max((logged_step(folder) for folder in logs if folder is not None), default=-1)
    rows = state.get(ROWS_KEY)
    return LastRun(last, searched, specifications, state["global_step"], state["epoch"], logged, rows)


def find_for_evaluation(trainer_options: Mapping[str, Any], which: str) -> Path:
    """Find the best or the last checkpoint of the newest run that a trainer with these options has made.

    Args:
        trainer_options: The section `trainer` of the configuration.
        which: "best" or "last", as in `lit_cond.runs.find_checkpoint`.

    Returns:
        Its path.

    Raises:
        ConfigurationError: If there is none.
    """
    base = Path(trainer_options.get("default_root_dir") or Path.cwd())
    folders, _ = _run_folders(list(_loggers(trainer_options.get("logger"), base)), base)
    places = [*(folder / "checkpoints" for folder in folders), *_dirpaths(trainer_options.get("callbacks"))]
    for place in places:
        with suppress(DataError):
            return find_checkpoint(place, which)
    searched = ", ".join(f"'{os.path.relpath(place)}'" for place in places or [base])
    raise ConfigurationError(f"ckpt_path: there is no checkpoint in {searched}: give the path of one")


def _loggers(option: Any, base: Path) -> Iterator[_Logger]:
    if option is False:
        return
    if option is None or option is True:
        known = any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX"))
        option = {
            "class_path": f"lightning.pytorch.loggers.{'TensorBoardLogger' if known else 'CSVLogger'}",
            "init_args": {"save_dir": str(base)},
        }
    for one in option if isinstance(option, list) else [option]:
        class_path, init_args = one["class_path"], dict(one.get("init_args") or {})
        save_dir = Path(init_args.get("save_dir") or base)
        root = None
        module, _, name = class_path.rpartition(".")
        if issubclass(getattr(importlib.import_module(module), name), (TensorBoardLogger, CSVLogger)):
            root = save_dir / (init_args.get("name", "lightning_logs") or "")
        yield _Logger(class_path, init_args, save_dir, root, init_args.get("version"))


def _run_folders(loggers: list[_Logger], base: Path, *, same_job: bool = False) -> tuple[list[Path], Version | None]:
    """Return the folders of the newest run, and its version where there are several.

    Args:
        loggers: The loggers.
        base: The folder of runs without a logger.
        same_job: Whether to leave out a run that has begun with ``--ckpt_path last`` and has no checkpoint.
    """
    if not loggers:
        return [base], None
    first = loggers[0]
    if first.root is None:  # a logger with folders of its own kind: <save_dir>/<name>/<version>/checkpoints
        folders = [path.parent for path in first.save_dir.glob("*/*/checkpoints")]
        return sorted(folders, key=_changed)[-1:], None
    if first.version is not None:
        return [first.root / _folder_name(first.version)], first.version
    runs = {int(match[1]): path for path in first.root.glob("version_*") if (match := _is_run(path))}
    numbers = sorted(runs, reverse=True)
    if not numbers:
        return [], None
    newest = numbers[0]
    written = [number for number in numbers if any(runs[number].rglob("*.ckpt"))]
    if same_job and written and newest != written[0]:
        older = runs[written[0]]
        if all(_began_with_last(runs[number]) for number in numbers if number > written[0]):
            # Had there been a checkpoint when it began, it would have gone on from that: two were started at once.
            tell(
                f"ckpt_path: '{os.path.relpath(runs[newest])}' has no checkpoint: the newest run that has one is "
                f"'{os.path.relpath(older)}'"
            )
            newest = written[0]
        else:
            tell(
                f"ckpt_path: the newest run, '{os.path.relpath(runs[newest])}', was begun anew and has no checkpoint; "
                f"to go on with '{os.path.relpath(older)}' give the path of a checkpoint in it"
            )
    return [runs[newest]], newest


def _began_with_last(folder: Path) -> bool:
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return False
    return isinstance(config, dict) and config.get("ckpt_path") == "last"


def _is_run(folder: Path) -> re.Match[str] | None:
    """Say whether a version folder is that of a training; an evaluation makes one too."""
    training = (folder / "config.yaml").is_file() or any(folder.rglob("*.ckpt"))
    return _VERSION_FOLDER.fullmatch(folder.name) if training else None


def _folder_name(version: Version) -> str:
    return version if isinstance(version, str) else f"version_{version}"


def _changed(folder: Path) -> int:
    return max((path.stat().st_mtime_ns for path in folder.rglob("*.ckpt")), default=0)


def _dirpaths(callbacks: Any) -> list[Path]:
    listed = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    given = [(one.get("init_args") or {}).get("dirpath") for one in listed if hasattr(one, "get")]
    return [Path(path).expanduser() for path in given if path and "://" not in str(path)]


def _resumable(path: Path) -> dict[str, Any] | None:
    try:
        state = read_checkpoint(path, mmap=True)
    except CheckpointFileError as error:
        rank_zero_warn(f"ckpt_path: passed over: {error}", category=LitCondWarning)
        return None
    if "optimizer_states" not in state:
        tell(f"ckpt_path: passed over: '{path}' holds weights alone")
        return None
    return state


def _undamaged(path: Path) -> bool:
    """Compare a checkpoint with its checksums."""
    try:
        read_checkpoint(path)
    except CheckpointFileError as error:
        rank_zero_warn(f"ckpt_path: passed over: {error}", category=LitCondWarning)
        return False
    return True


def _log_folder(logger: _Logger, version: Version | None) -> Path | None:
    chosen = logger.version if logger.version is not None else version
    return None if logger.root is None or chosen is None else logger.root / _folder_name(chosen)


def _progress(state: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how far a run was, the end of a validation and of an epoch being further than their last batch."""
    loops = state["loops"]["fit_loop"]
    batches, epochs = loops["epoch_loop.batch_progress"]["total"], loops["epoch_progress"]["total"]
    # Of several that were written in a row the last one knows most of the others; times of files are too coarse.
    callbacks = [one for one in state.get("callbacks", {}).values() if isinstance(one, Mapping)]
    paths = [one.get(key) for one in callbacks for key in ("best_model_path", "last_model_path")]
    return state["global_step"], batches["ready"], batches["completed"], epochs["processed"], sum(map(bool, paths))


def _version_of(state: Mapping[str, Any], index: int, default: Version | None = None) -> Version | None:
    """Return the version of a logger that the checkpoint records."""
    recorded = state.get("callbacks", {}).get(_RESUME_KEY, {}).get("versions", [])
    if index < len(recorded):
        version: Version | None = recorded[index]
        return version
    return default if index == 0 else None


def _pinned(logger: _Logger, version: Version | None) -> dict[str, Any]:
    init_args = dict(logger.init_args)
    if logger.root is not None and logger.version is None and version is not None:
        init_args["version"] = version
    return {"class_path": logger.class_path, "init_args": init_args}


@rank_zero_only
def tell(text: str) -> None:
    """Print a line, in the first process."""
    print(text)
