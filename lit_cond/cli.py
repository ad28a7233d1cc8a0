"""The command line: LightningCLI with a flat group for each callback and errors of one line."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeUnion,
    instantiate_class,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

# Importing the packages is what makes the short names of their classes known.
import lit_cond.data
import lit_cond.tasks  # noqa: F401
from lit_cond.atomic_io import AtomicCheckpointIO
from lit_cond.callbacks import ExactResume
from lit_cond.checkpoint import state_mismatch
from lit_cond.cli_last import LastRun, find_for_evaluation, find_last, tell
from lit_cond.cli_lock import RunLock, take_lock
from lit_cond.cli_log import LogPlace, keep_rows
from lit_cond.cli_parser import CALLBACK_GROUPS, LitCondParser, exit_with, wants_traceback
from lit_cond.cli_resume import (
    CHECKPOINT_DECIDES,
    KeepGivenOptions,
    TellLostWeights,
    checked_path,
    differences,
    saved_arguments,
)
from lit_cond.errors import ConfigurationError, LitCondError, LitCondWarning
from lit_cond.summary import finish_fit

__all__ = ["LitCondCLI", "main"]

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_DISK = {*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}

# What a module that is no task of ours says of itself is meant for an evaluation.
_TOKENS_LOST = (
    "its tokens were corrected: load it with lit_cond.load_checkpoint",
    "the checkpoint was made with corrected tokens, and this run has no ConditionedTokens: give its options as they "
    "were (leave out `--tokens null`), or begin a new run without ckpt_path",
)


class LitCondCLI(LightningCLI):
    """LightningCLI for the tasks and data modules of lit_cond and for any others given by import path."""

    def __init__(self, args: ArgsType = None) -> None:
        self.family: list[LitCondParser] = []
        self.ckpt_path: str | None = None
        self.written: dict[str, Any] = {}
        self.keep_options = False
        self.last_run: LastRun | None = None
        super().__init__(
            parser_class=LitCondParser,
            seed_everything_default=0,
            # A run folder without a version is used again: the newest configuration is the valid one.
            save_config_kwargs={"overwrite": True},
            args=args,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser that knows the ones of all commands."""
        parser = super().init_parser(**kwargs)
        if isinstance(parser, LitCondParser):
            self.family.append(parser)
            parser.family = self.family
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callback groups, `test_after_fit` and the link from the data to the model."""
        for key, callback in CALLBACK_GROUPS.items():
            parser.add_argument(
                f"--{key}",
                type=callback | None,
                default=None,
                help=f"Options of {callback.__name__}; null for none. One option: --{key}.NAME VALUE",
            )
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=True,
            help="Whether fit tests its best checkpoint at the end, where there is a test set.",
        )
        target = "model.init_args.num_classes"
        parser.link_arguments("data", target, compute_fn=self._num_classes, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and fill what the user has not written from the checkpoint of ``--ckpt_path``."""
        super().parse_arguments(parser, args)
        command = self.config["subcommand"]
        given = args
        if not isinstance(given, (dict, Namespace)):
            given = parser.parse_args(given, defaults=False)
        self.given = given[command]
        options = self.config[command]
        self.ckpt_path = options.get("ckpt_path")
        if self.ckpt_path == "last" and command == "fit":
            self._find_last(parser)
            options = self.config[command]
        elif self.ckpt_path in ("best", "last"):
            # Lightning knows those of a fit in the same process alone.
            found = find_for_evaluation(options["trainer"], self.ckpt_path)
            tell(f"ckpt_path: the {self.ckpt_path} checkpoint of the newest run is '{os.path.relpath(found)}'")
            self.ckpt_path = options["ckpt_path"] = str(found)
        self.keep_options = self.ckpt_path is not None
        path = checked_path(self.ckpt_path)
        if path is None:
            return
        # LightningCLI would now read the checkpoint itself and let it win; the path is set back below.
        options["ckpt_path"] = None
        class_path, saved = saved_arguments(path, options.get("weights_only") is not False)
        model = options["model"]
        if class_path is not None and class_path != model["class_path"]:
            rank_zero_warn(
                f"ckpt_path: the checkpoint was written by {class_path}, the configuration asks for "
                f"{model['class_path']}: the arguments in the checkpoint are not used",
                category=LitCondWarning,
            )
            return
        self._merge_saved(parser, command, saved)

    def _find_last(self, parser: LightningArgumentParser) -> None:
        """Put the path of the last checkpoint in the place of the word, and let the log go on where it was."""
        options = self.config["fit"]
        # What is saved beside the run is what the user has written: the same command goes on once more.
        self.written = {"ckpt_path": "last", "logger": deepcopy(options["trainer"].get("logger"))}
        run = find_last(options["trainer"])
        if run.checkpoint is None:
            places = ", ".join(f"'{os.path.relpath(folder)}'" for folder in run.searched)
            tell(f"ckpt_path: no checkpoint to go on from yet in {places}: the run begins at the beginning")
            self.ckpt_path = options["ckpt_path"] = None
            return
        self.last_run = run
        tell(f"ckpt_path: going on from '{os.path.relpath(run.checkpoint)}' (epoch {run.epoch}, step {run.step})")
        if run.logged > run.step:
            tell(
                f"ckpt_path: the log of the run goes on to step {run.logged}: what came after step {run.step} is "
                "trained again; a ModelCheckpoint without `monitor` writes a checkpoint every epoch"
            )
        self.ckpt_path = options["ckpt_path"] = str(run.checkpoint)
        if run.loggers:
            logger = run.loggers if len(run.loggers) > 1 else run.loggers[0]
            self.config = parser.parse_object({"fit": {"trainer": {"logger": logger}}}, self.config)

    def _merge_saved(self, parser: LightningArgumentParser, command: str, saved: dict[str, Any]) -> None:
        model = self.config[command]["model"]
        accepted = vars(model["init_args"]) if model.get("init_args") else {}
        given = self.given["model"].get("init_args") or {}
        written = given.as_dict() if isinstance(given, Namespace) else dict(given)
        for key in CHECKPOINT_DECIDES:
            if key in saved:
                written.pop(key, None)
        changed = differences(written, saved)
        if changed:
            listed = ", ".join(f"{key} = {new!r} (not {old!r})" for key, (new, old) in changed.items())
            rank_zero_warn(
                f"ckpt_path: given values win over those of the checkpoint: {listed}", category=LitCondWarning
            )
        self.keep_options = bool(changed)
        kept = {key: value for key, value in saved.items() if key in accepted and key not in written}
        spec = {"class_path": model["class_path"], "init_args": {**kept, **written}}
        self.config = parser.parse_object({command: {"model": spec}}, self.config)

    def before_instantiate_classes(self) -> None:
        """Set the checkpoint back, and name the saved configuration after the command."""
        if self.ckpt_path is not None:
            self.config[self.subcommand]["ckpt_path"] = self.ckpt_path
        if self.subcommand != "fit":
            # With a fixed folder an evaluation must not overwrite the configuration of the training run.
            self.save_config_kwargs["config_filename"] = f"config_{self.subcommand}.yaml"

    def _num_classes(self, datamodule: pl.LightningDataModule | None) -> int | None:
        """Return the number of classes that the model is built for: that of the data, else the given one.

        Raises:
            ConfigurationError: There is none although the model needs it, or the two differ.
        """
        found: int | None = getattr(datamodule, "num_classes", None)
        options = self.config[self.subcommand]["model"].get("init_args") or {}
        if "num_classes" not in options:  # a model without classes
            return found
        given = self.given["model"].get("init_args") or {}
        wanted: int | None = given.get("num_classes")
        if found is None and options["num_classes"] is None:
            holder = "there is no data module" if datamodule is None else f"{type(datamodule).__name__} has none"
            raise ConfigurationError(f"model.num_classes is missing, and {holder} to take it from: give a number")
        if found is not None and wanted is not None and wanted != found:
            raise ConfigurationError(
                f"model.num_classes is {wanted}, and the data has {found} classes: leave it out, it is taken "
                "from the data"
            )
        return options["num_classes"] if found is None else found

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer, with the callbacks of the groups before those of `trainer.callbacks`.

        Raises:
            ConfigurationError: Lightning refuses a value.
        """
        options = self.config_init[self.subcommand]
        for key, section in (("ckpt_path", options), ("logger", options["trainer"])):
            if key in self.written:
                saved = self.config[self.subcommand]
                (saved if section is options else saved["trainer"])[key] = self.written[key]
        listed = options["trainer"].get("callbacks") or []
        listed = listed if isinstance(listed, list) else [listed]
        grouped = [options[key] for key in CALLBACK_GROUPS if options.get(key) is not None]
        kwargs.setdefault("callbacks", [*grouped, *listed, *self._resume_callbacks(listed)])
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except LitCondError:
            raise
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ConfigurationError(f"trainer: {error}") from error
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # neither the user's own nor a strategy's
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def _resume_callbacks(self, listed: Sequence[pl.Callback]) -> list[pl.Callback]:
        found: list[pl.Callback] = [LogPlace(), RunLock()] if self.subcommand == "fit" else []
        if self.ckpt_path is not None and self.subcommand == "fit":
            changed = self.keep_options or self.given.get("optimizer") is not None
            found += [TellLostWeights(), *([KeepGivenOptions()] if changed else [])]
        # The last one: what others do at the start of the training does not move the random numbers that it restores.
        return found if any(isinstance(one, ExactResume) for one in listed) else [*found, ExactResume()]

    def before_fit(self) -> None:
        """Keep the run for this process, and the rows that it had when its checkpoint was written.

        Raises:
            ConfigurationError: Another process is training in the folder of the run.
        """
        if self.last_run is not None:
            take_lock(self.trainer)
            keep_rows(self.trainer, self.last_run.rows, self.last_run.step)

    def configure_optimizers(  # type: ignore[override]
        self,
        lightning_module: pl.LightningModule,
        optimizer: Optimizer,
        lr_scheduler: LRSchedulerTypeUnion | None = None,
    ) -> Any:
        """Use the optimizer of ``--optimizer``, with the parameter groups of the task where it has its own.

        A task says which parameters have no weight decay in ``parameter_groups(weight_decay)``; the optimizer
        that LightningCLI has made holds all parameters in one group.
        """
        grouping = getattr(lightning_module, "parameter_groups", None)
        if callable(grouping) and "weight_decay" in optimizer.defaults:
            options = self.config_init[self.subcommand]
            groups = grouping(optimizer.defaults["weight_decay"])
            optimizer = instantiate_class(groups, options["optimizer"])
            if lr_scheduler is not None:
                lr_scheduler = instantiate_class(optimizer, options["lr_scheduler"])
        return super().configure_optimizers(lightning_module, optimizer, lr_scheduler)

    def after_fit(self) -> None:
        """Test the best checkpoint and print the summary."""
        command = self.config_init[self.subcommand]
        finish_fit(self.trainer, self.model, self.datamodule, test=command["test_after_fit"])


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        args: The words of the command line after the program's name; None takes those of the process.

    Raises:
        SystemExit: With code 2, after one line on stderr, for a mistake that lit_cond or the parser names.
    """
    # Lightning 2.6 calls what torch 2.14 calls deprecated; no user of ours can mend it.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    try:
        LitCondCLI(args=None if args is None else list(args))
    except Exception as error:
        known = _cause(error) or _disk_error(error)
        if known is None or wants_traceback():
            raise
        words = list(sys.argv[1:] if args is None else args)
        exit_with(_one_line(known).replace(*_TOKENS_LOST) if words[:1] == ["fit"] else _one_line(known), error)


def _cause(error: BaseException | None) -> LitCondError | None:
    # jsonargparse wraps what a constructor raises into an error of its own.
    while error is not None and not isinstance(error, LitCondError):
        mismatch = state_mismatch(error)
        if mismatch is not None:
            return mismatch
        error = error.__cause__
    return error


def _disk_error(error: BaseException | None) -> LitCondError | None:
    """Return one line for what the disk has refused: no space, no right, a file where a folder should be."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _DISK):
        error = error.__cause__ or error.__context__
    if not isinstance(error, OSError):
        return None
    place = f"'{os.path.relpath(os.fsdecode(error.filename))}': " if isinstance(error.filename, (str, bytes)) else ""
    advice = "give another place (--trainer.default_root_dir, save_dir of the logger, the folder of the data)"
    if error.errno in _FULL:
        advice = "make room; checkpoints that were written before are whole, go on with --ckpt_path last"
    return ConfigurationError(f"{place}{error.strerror}: {advice}")


def _one_line(error: LitCondError) -> str:
    text = str(error).strip()
    if "Original Traceback" in text:  # raised in a worker process of a DataLoader
        text = text.splitlines()[-1].partition(": ")[2]
    return text
