"""The whole model as a graph, corrected tokens included, and its file of torch.export, which is read back and run."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lit_cond.export.compare import tensors_in
from lit_cond.export.example import batch_size, sequences
from lit_cond.export.formats import UnfitFormatError, first_line, writing
from lit_cond.surgery.samples import Sample

__all__ = ["Runner", "capturing", "length_range", "read_pt2", "to_program", "without_cache", "write_pt2"]

Runner = Callable[[Sample], list[Tensor]]
"""Runs an exported file on a batch and returns its outputs in order."""


def to_program(
    model: nn.Module, sample: Sample, *, dynamic_batch: bool = True, dynamic_length: bool = False
) -> ExportedProgram:
    """Capture a model in evaluation mode as a graph.

    Args:
        model: The model, its weight corrections folded.
        sample: A batch of at least two samples.
        dynamic_batch: Whether the graph shall take batches of any size.
        dynamic_length: Whether the graph shall take sequences of other lengths, see `sequences`.

    Raises:
        UnfitFormatError: If torch.export can not capture it.
    """
    if not hasattr(torch.export, "ShapesCollection"):
        raise UnfitFormatError(
            f"torch {torch.__version__} is too old for onnx and pt2",
            "install torch>=2.6, or leave both out with --formats",
        )
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    size, batch = batch_size(sample), Dim("batch")
    lengths = {id(tensor) for tensor in sequences(sample)} if dynamic_length else set()
    for tensor in tensors_in((sample.args, sample.kwargs)) if dynamic_batch else ():
        if tensor.ndim and tensor.shape[0] == size:
            # torch finds the limits of a length itself, and fails if only that of the example is possible.
            shapes[tensor] = {0: batch, 1: Dim.DYNAMIC} if id(tensor) in lengths else {0: batch}
    kwargs = dict(sample.kwargs)
    try:
        with capturing():
            sample.run(model)  # a first pass looks at masks, which a graph can not
            program = torch.export.export(model, sample.args, kwargs, dynamic_shapes=shapes if dynamic_batch else None)
    except Exception as error:  # whatever a foreign forward raises under capture
        unknown = re.match(r"Found <class '(.+?)'> in output", str(error))
        line = f"it returns {unknown[1]}, which a graph can not" if unknown else first_line(error)
        advice = "leave onnx and pt2 out with --formats"
        reason = f"torch.export can not capture {type(model).__name__}: {type(error).__name__}: {line}"
        if dynamic_batch and not unknown and ("batch" in str(error) or "dynamic" in str(error)):
            reason += f"; --fixed-batch exports it for batches of {size} only"
            advice = "or " + advice
        raise UnfitFormatError(reason, advice) from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # the paths of this machine
    return program


def length_range(program: ExportedProgram) -> tuple[int, int | None] | None:
    """Return the smallest and the largest length of sequences that a graph takes; None if it takes one only.

    The largest one is None where there is no limit.
    """
    limits = {str(symbol): values for symbol, values in program.range_constraints.items()}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs:
            continue
        if isinstance(value, Tensor) and value.ndim > 1 and (found := limits.get(str(value.shape[1]))):
            lower, upper = (
                int(end) if end.is_Integer and abs(int(end)) < 2**31 else None for end in (found.lower, found.upper)
            )
            return max(lower or 1, 1), upper
    return None


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let models of transformers return no cache of keys and values, which is no tensor."""
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    cached = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in cached:
        config.use_cache = False
    try:
        yield
    finally:
        for config in cached:
            config.use_cache = True


@contextmanager
def capturing() -> Iterator[None]:
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


def write_pt2(program: ExportedProgram, path: Path) -> None:
    """Write a graph for `torch.export.load`; the batch that it was made with is left out."""
    program = copy.copy(program)
    program.example_inputs = None
    # On a full disk, torch's own writer ends the process.
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with writing(path.name):
        path.write_bytes(buffer.getbuffer())


def read_pt2(path: Path) -> Runner:
    """Return a function that runs what `write_pt2` has written."""
    module = torch.export.load(path).module()

    def run(sample: Sample) -> list[Tensor]:
        with torch.no_grad():
            return list(tensors_in(module(*sample.args, **sample.kwargs)))

    return run
