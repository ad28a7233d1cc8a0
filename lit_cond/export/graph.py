"""The whole model as a graph, corrected tokens included: torch.export and ONNX. Each is read back and run."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lit_cond.errors import ConfigurationError
from lit_cond.export.compare import tensors_in
from lit_cond.export.example import batch_size
from lit_cond.extras import optional_imports
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.tokens import TokenForward, token_forwards

__all__ = ["Runner", "read_onnx", "read_pt2", "to_program", "with_products", "write_onnx", "write_pt2"]

Runner = Callable[[Sample], list[Tensor]]
"""Runs an exported file on a batch and returns its outputs in order."""


def to_program(model: nn.Module, sample: Sample, *, dynamic_batch: bool = True) -> ExportedProgram:
    """Capture a model in evaluation mode as a graph.

    Args:
        model: The model, its weight corrections folded.
        sample: A batch of at least two samples.
        dynamic_batch: Whether the graph shall take batches of any size.

    Raises:
        ConfigurationError: If torch.export can not capture it.
    """
    if not hasattr(torch.export, "ShapesCollection"):
        raise ConfigurationError(
            f"torch {torch.__version__} is too old for onnx and pt2: install torch>=2.6, or leave both out with "
            "--formats"
        )
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    size, batch = batch_size(sample), Dim("batch")
    if dynamic_batch:
        for tensor in tensors_in((sample.args, sample.kwargs)):
            if tensor.ndim and tensor.shape[0] == size:
                shapes[tensor] = {0: batch}
    kwargs = dict(sample.kwargs)
    try:
        with _capturing():
            sample.run(model)  # a first pass looks at masks, which a graph can not
            program = torch.export.export(model, sample.args, kwargs, dynamic_shapes=shapes if dynamic_batch else None)
    except Exception as error:  # whatever a foreign forward raises under capture
        line = next(iter(str(error).strip().splitlines()), "")
        advice = "leave onnx and pt2 out with --formats"
        if dynamic_batch and ("batch" in str(error) or "dynamic" in str(error)):
            advice = f"--fixed-batch exports it for batches of {size} only, or " + advice
        raise ConfigurationError(
            f"torch.export can not capture {type(model).__name__}: {type(error).__name__}: {line}; {advice}"
        ) from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # the paths of this machine
    return program


@contextmanager
def _capturing() -> Iterator[None]:
    """Without gradients, torch's fused encoder kernels (no graph format knows them) and the pages that torch logs."""
    logger, fast = logging.getLogger("torch"), torch.backends.mha.get_fastpath_enabled()
    level = logger.level
    torch.backends.mha.set_fastpath_enabled(False)
    logger.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fast)


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


def write_pt2(program: ExportedProgram, path: Path) -> None:
    """Write a graph for `torch.export.load`; the batch that it was made with is left out."""
    program = copy.copy(program)
    program.example_inputs = None
    torch.export.save(program, path)


def read_pt2(path: Path) -> Runner:
    """Return a function that runs what `write_pt2` has written."""
    module = torch.export.load(path).module()

    def run(sample: Sample) -> list[Tensor]:
        with torch.no_grad():
            return list(tensors_in(module(*sample.args, **sample.kwargs)))

    return run


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write a graph as ONNX, without what torch notes of its origin at every node.

    Raises:
        ConfigurationError: If an operation has no counterpart in ONNX.
        MissingExtraError: If onnx or onnxscript is not installed.
    """
    with optional_imports("model.onnx", extra="export"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    try:
        with _capturing():
            made: Any = torch.onnx.export(program, verbose=False)
    except Exception as error:  # whatever the conversion raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        line = next(iter(str(cause).strip().splitlines()), "")
        raise ConfigurationError(f"ONNX can not hold the model: {line}; leave onnx out with --formats") from error
    graph = made.model.graph
    # torch calls the size of a batch by the name of its own symbol.
    sizes = {str(value.shape[0]) for value in graph.inputs if value.shape and not isinstance(value.shape[0], int)}
    for value in [*graph.inputs, *graph.outputs]:
        for axis, size in enumerate(value.shape or ()):
            if len(sizes) == 1 and str(size) in sizes:
                value.shape[axis] = "batch"
    for node in graph.all_nodes():
        node.metadata_props.clear()
    made.save(path)


def read_onnx(path: Path) -> Runner:
    """Return a function that runs an ONNX file with onnxruntime on the CPU.

    Raises:
        ConfigurationError: If onnxruntime can not run it.
        MissingExtraError: If onnxruntime is not installed.
    """
    with optional_imports("checking model.onnx", extra="export"):
        import onnxruntime
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an exception class for each kind of failure
        line = next(iter(str(error).strip().splitlines()), "")
        raise ConfigurationError(
            f"onnxruntime can not run model.onnx: {line}; leave onnx out with --formats"
        ) from error
    names: Sequence[str] = [value.name for value in session.get_inputs()]

    def run(sample: Sample) -> list[Tensor]:
        arrays = [tensor.detach().cpu().numpy() for tensor in tensors_in((sample.args, sample.kwargs))]
        return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, arrays, strict=True)))]

    return run
