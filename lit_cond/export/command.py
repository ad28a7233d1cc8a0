"""The words of ``python -m lit_cond export``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lit_cond.errors import ExportMismatchError, LitCondError
from lit_cond.export.formats import FILES, FORMATS

if TYPE_CHECKING:
    from lit_cond.export.run import ExportReport

__all__ = ["main"]

_DESCRIPTION = """\
Write the trained model of a checkpoint for other programs. Corrections of weights become a part of the weights. Every
file is read back and compared with the model; the largest difference is printed.

  OUT/model.safetensors   weights of the backbone under its own names; with corrected tokens there is one more entry,
                          without which a strict load into the plain backbone fails
  OUT/huggingface         the folder that from_pretrained reads, where the backbone is a model of transformers and no
                          tokens are corrected
  OUT/model.onnx          the whole model for ONNX, corrected tokens included, for batches of any size and, where it
                          can, sequences of any length
  OUT/model.pt2           the whole model for torch.export.load, likewise
  OUT/export.json         what was written, from what

CKPT is a checkpoint of Lightning, or the folder of a run of `lit_cond fit`, whose best checkpoint is taken.
"""

_EPILOG = """\
exit code: 0; 1 if a file does not compute what the model computes; 2 if the model can not be loaded or written. After 1
and 2 there is no OUT.

examples:
  python -m lit_cond export runs/digits_vit/version_0 exported
  python -m lit_cond export last.ckpt exported --class my_package.model:MyModule --data batch.pt --formats onnx
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"export: {message}; see python -m lit_cond export --help")


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: The words after ``export``.

    Raises:
        SystemExit: With code 1 if a file does not compute what the model computes, 2 for what the user can repair; one
            line stands on stderr.
    """
    parser = _Parser(
        prog="python -m lit_cond export",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or the folder of a run")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"of {', '.join(FORMATS)}; an error where one does not fit the model (without: it is left out)",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help="a batch that the model takes, as for inspect: what torch.save has written of a tensor, a tuple of "
        "arguments or a dictionary of them, or a .npy file; one of random numbers when omitted",
    )
    parser.add_argument(
        "--class",
        dest="model_class",
        metavar="MODULE:NAME",
        help="the LightningModule, or a function that returns the model, where the checkpoint does not record it",
    )
    parser.add_argument("--backbone", metavar="NAME", help="the part whose weights are written; '' for the whole model")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="how far outputs may differ, in parts of the largest one (default: 1e-4 for float32)",
    )
    parser.add_argument("--fixed-batch", action="store_true", help="graphs for the shapes of the example only")
    options = parser.parse_args(arguments)
    if options.tolerance is not None and not options.tolerance >= 0:
        parser.error(f"--tolerance is {options.tolerance}: give 0 or more")
    try:
        _export(options)
    except LitCondError as error:
        if os.environ.get("LIT_COND_TRACEBACK"):
            raise
        _fail(str(error), code=1 if isinstance(error, ExportMismatchError) else 2)


def _export(options: argparse.Namespace) -> None:
    from lit_cond.export.run import export_checkpoint

    report = export_checkpoint(
        options.checkpoint,
        options.out,
        model_class=options.model_class,
        formats=options.formats,
        example=options.data,
        backbone=options.backbone,
        tolerance=options.tolerance,
        dynamic_batch=not options.fixed_batch,
    )
    print("\n".join(_lines(report)))


def _lines(report: ExportReport) -> list[str]:
    rows = [
        ("model", report.model),
        ("backbone", f"{report.backbone or 'the whole model'} ({report.backbone_class})"),
        ("corrected weights", f"{report.weights}, folded"),
        ("corrected tokens", ", ".join(report.tokens) or "none"),
        ("compared on", report.example or "nothing"),
    ]
    lines = [f"{label:19}{text}" for label, text in rows]
    lines += ["", f"{'file':19}largest difference, in parts of the largest output ({report.tolerance:g} allowed)"]
    for file in report.files:
        free = f"; free: {', '.join(file.free)}" if file.free else ""
        lines.append(f"{file.name:19}{'not compared' if file.difference is None else f'{file.difference:.1e}'}{free}")
    lines += [f"{FILES[name]:19}left out: {reason}" for name, reason in report.left_out.items()]
    lines += ["", *report.notes] if report.notes else [""]
    return [*lines, f"wrote {report.out}"]


def _fail(text: str, code: int = 2) -> NoReturn:
    print(f"lit_cond: error: {' '.join(text.split())}", file=sys.stderr)
    raise SystemExit(code)
