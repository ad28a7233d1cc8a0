"""Writing a model in several formats, each read back and compared with the model; all of them or none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_cond import __version__
from lit_cond.checkpoint_file import read_checkpoint
from lit_cond.errors import ConfigurationError, LitCondError
from lit_cond.export.example import describe
from lit_cond.export.formats import FORMATS, ExportedFile, Format
from lit_cond.export.job import Job
from lit_cond.export.source import load_trained
from lit_cond.surgery.checkpoint import read_record
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights

__all__ = ["ExportReport", "export_checkpoint", "export_model"]


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Args:
        out: The folder.
        model: Class of the model.
        backbone: Name of the part whose weights were written, "" for the whole model.
        backbone_class: Its class.
        weights: How many weights carry a correction, now a part of them.
        tokens: The corrections of tokens that are a part of the model, by the name of their block in the backbone.
        example: Types and shapes of the batch that the files were made and checked with; None without one.
        tolerance: How far outputs may differ, in parts of the largest one.
        checkpoint: Name of the file that the model came from; None for a model in memory.
        files: What was written.
        left_out: What does not apply to the model, or can not hold it, and why.
        notes: What a reader of the files should know.
    """

    out: Path
    model: str
    backbone: str
    backbone_class: str
    weights: int
    tokens: Mapping[str, Mapping[str, Any]]
    example: str | None
    tolerance: float
    checkpoint: str | None = None
    files: Sequence[ExportedFile] = ()
    left_out: Mapping[Format, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, model_class: str | None = None, **options: Any
) -> ExportReport:
    """Export the model of a checkpoint.

    Args:
        checkpoint: A checkpoint of Lightning, or the folder of a run, of which the best one is taken.
        out: The folder to make.
        model_class: `package.module:Class`, or `package.module:function` for a function that returns the model; None
            takes what the checkpoint or the run's config.yaml records.
        **options: As in `export_model`.

    Raises:
        LitCondError: As in `export_model`, or if the model of the checkpoint can not be loaded.
    """
    _require_free(Path(out))
    path, model = load_trained(checkpoint, model_class)
    # Of a checkpoint of weights only, the model does not know that its weights carry corrections.
    corrected = len(read_record(read_checkpoint(path, mmap=True))["weights"])
    return _export(model, Path(out), corrected, path.name, **options)


def export_model(
    model: nn.Module,
    out: str | Path,
    *,
    formats: Sequence[Format] | None = None,
    example: Any = None,
    backbone: str | None = None,
    tolerance: float | None = None,
    dynamic_batch: bool = True,
) -> ExportReport:
    """Write a model in several formats into a new folder; every file is read back and compared with the model.

    Corrections of weights become a part of the weights; those of tokens become a part of the graphs, and an entry of
    the state dict without which no plain model loads it strictly. The model stays as it is.

    Args:
        model: A LightningModule or another model, on the CPU.
        out: The folder to make. It appears when everything in it is written and checked.
        formats: What to write: "safetensors" and "huggingface" hold the backbone's weights, "onnx" and "pt2"
            (`torch.export`) the whole model. None writes all that apply and can hold the model.
        example: A batch: a tensor, a tuple of arguments, a dictionary of arguments by name, or the path of one as in
            `inspect --data`. None makes one of what the model says that it takes.
        backbone: Name of the part whose weights are written, see `find_backbone`.
        tolerance: How far outputs may differ, in parts of the largest one; None takes `default_tolerance`.
        dynamic_batch: Whether graphs take batches of any size, and sequences of any length where that is possible.

    Raises:
        ConfigurationError: If the folder exists, a format that was named does not fit the model, or the model can
            not run on the example.
        ExportMismatchError: If a file does not compute what the model computes.
        MissingExtraError: If a library is not installed.
    """
    corrected = len({id(weight.parameter) for _, weight in conditioned_weights(model)})
    return _export(
        model,
        Path(out),
        corrected,
        None,
        formats=formats,
        example=example,
        backbone=backbone,
        tolerance=tolerance,
        dynamic_batch=dynamic_batch,
    )


def _export(
    model: nn.Module,
    out: Path,
    corrected: int,
    checkpoint: str | None,
    *,
    formats: Sequence[Format] | None = None,
    example: Any = None,
    backbone: str | None = None,
    tolerance: float | None = None,
    dynamic_batch: bool = True,
) -> ExportReport:
    _require_free(out)
    for name in formats if formats is not None else ():
        if name not in FORMATS:
            raise ConfigurationError(f"format {name!r} is unknown: choose from {', '.join(FORMATS)}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        job = Job(model, formats, example, backbone, tolerance, dynamic_batch)
        with _new_folder(out) as folder:
            written = [job.write(name, folder) for name in job.formats]
            files = tuple(file for file in written if file is not None)
            report = replace(_report(job, out, corrected, checkpoint), files=files)
            (folder / "export.json").write_text(json.dumps(_as_dict(report), indent=2) + "\n")
    return report


def _require_free(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ConfigurationError(f"'{out}' exists already: give another folder, or remove it")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` that becomes `out` at the end; after an error nothing is left."""
    made = [parent for parent in out.parents if not parent.exists()]
    folder = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        yield folder
        mask = os.umask(0)
        os.umask(mask)
        # A temporary folder and some of the files are their owner's alone.
        for path in [folder, *folder.rglob("*")]:
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        folder.rename(out)
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError) and not isinstance(error, LitCondError):
            raise ConfigurationError(f"'{out}' can not be written: {error.strerror or error}") from error
        raise


def _as_dict(report: ExportReport) -> dict[str, Any]:
    content = asdict(report)
    del content["out"]
    return {"lit_cond": __version__, "torch": str(torch.__version__), **content}


def _report(job: Job, out: Path, corrected: int, checkpoint: str | None) -> ExportReport:
    part = job.folded.get_submodule(job.name)
    return ExportReport(
        out,
        _path_of(job.live),
        job.name,
        _path_of(part),
        corrected,
        {name: {**f.rule.settings(), "strength": float(f.strength)} for name, f in token_forwards(part)},
        None if job.example is None else describe(job.example),
        job.tolerance,
        checkpoint,
        left_out=job.left_out,
        notes=tuple(job.notes),
    )


def _path_of(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
