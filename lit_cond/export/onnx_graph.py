"""The ONNX file of a graph, which is read back and run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lit_cond.export.compare import tensors_in
from lit_cond.export.formats import UnfitFormatError, first_line, writing
from lit_cond.export.graph import Runner, capturing
from lit_cond.extras import optional_imports
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.tokens import TokenForward, token_forwards

__all__ = ["read_onnx", "returning_tensors", "with_products", "write_onnx"]


class _InFloat64(TokenForward):
    """Corrects tokens in float64: products in float32 lose a digit for each one in the condition number."""

    def _correction(self, matrices: Tensor, mask: Tensor | None) -> Tensor:
        return super()._correction(matrices.double(), mask)


def with_products(model: nn.Module) -> nn.Module:
    """Return a model whose tokens are corrected by products in float64: ONNX has no decomposition of matrices."""
    if not any(token_forwards(model)):
        return model
    model = copy.deepcopy(model)
    for _, forward in token_forwards(model):
        forward.rule = replace(forward.rule, backend="products")
        forward.__class__ = _InFloat64  # in its place, where the hooks of the block know it
    return model


def returning_tensors(model: nn.Module) -> nn.Module:
    """Return a copy of a model that returns its tensors only: ONNX has no other outputs."""
    model = copy.deepcopy(model)
    forward = model.forward

    @functools.wraps(forward)  # the names of its arguments become those of the inputs
    def tensors_only(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(tensors_in(forward(*args, **kwargs)))

    model.forward = tensors_only
    return model


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write a graph as ONNX, without what torch notes of its origin at every node.

    Raises:
        UnfitFormatError: If an operation has no counterpart in ONNX.
        MissingExtraError: If onnx or onnxscript is not installed.
    """
    with optional_imports("model.onnx", extra="export"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    try:
        with capturing():
            made: Any = torch.onnx.export(program, verbose=False)
    except Exception as error:  # whatever the conversion raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UnfitFormatError(
            f"ONNX can not hold the model: {first_line(cause)}", "leave onnx out with --formats"
        ) from error
    graph = made.model.graph
    # torch calls the sizes of batch and sequence by the names of its own symbols.
    names: dict[str, str] = {}
    for axis, name in enumerate(("batch", "length")):
        free = {
            str(v.shape[axis]) for v in graph.inputs if len(v.shape or ()) > axis and not isinstance(v.shape[axis], int)
        }
        if len(free) == 1:
            names.setdefault(free.pop(), name)
    for value in [*graph.inputs, *graph.outputs]:
        for axis, size in enumerate(value.shape or ()):
            if str(size) in names:
                value.shape[axis] = names[str(size)]
    for node in graph.all_nodes():
        node.metadata_props.clear()
    with writing(path.name):
        made.save(path)


def read_onnx(path: Path) -> Runner:
    """Return a function that runs an ONNX file with onnxruntime on the CPU.

    Raises:
        UnfitFormatError: If onnxruntime can not run it.
        MissingExtraError: If onnxruntime is not installed.
    """
    with optional_imports("checking model.onnx", extra="export"):
        import onnxruntime
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an exception class for each kind of failure
        raise UnfitFormatError(
            f"onnxruntime can not run model.onnx: {first_line(error)}", "leave onnx out with --formats"
        ) from error
    names: Sequence[str] = [value.name for value in session.get_inputs()]

    def run(sample: Sample) -> list[Tensor]:
        try:
            arrays = [tensor.detach().cpu().numpy() for tensor in tensors_in((sample.args, sample.kwargs))]
            return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]
        except Exception as error:  # as above, and numpy's for types that it does not have
            raise UnfitFormatError(
                f"onnxruntime can not run model.onnx: {first_line(error)}", "leave onnx out with --formats"
            ) from error

    return run
