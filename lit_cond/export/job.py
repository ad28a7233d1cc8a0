"""One export: the model as it is, the folded one, and the batches on which they and each file are compared."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lit_cond import __version__
from lit_cond.errors import ConfigurationError, ExportMismatchError
from lit_cond.export.compare import (
    default_tolerance,
    largest_difference,
    others_in,
    structural_difference,
    tensors_in,
)
from lit_cond.export.example import batch_size, find_example, jittered, resized
from lit_cond.export.formats import FILES, FORMATS, ExportedFile, Format, UnfitFormatError
from lit_cond.export.graph import Runner, read_pt2, to_program, without_cache, write_pt2
from lit_cond.export.lengths import Lengths
from lit_cond.export.onnx_graph import read_onnx, returning_tensors, with_products, write_onnx
from lit_cond.export.source import find_backbone
from lit_cond.export.unwrap import unwrapped_copy
from lit_cond.export.weights import (
    is_hugging_face,
    read_huggingface,
    read_safetensors,
    write_huggingface,
    write_safetensors,
)
from lit_cond.surgery.apply import fold_
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.tokens import token_forwards

__all__ = ["Job"]


class Job:
    """One export: the model as it is, the folded one, and the batches to compare them on."""

    def __init__(
        self,
        model: nn.Module,
        formats: Sequence[Format] | None,
        example: Any,
        backbone: str | None,
        tolerance: float | None,
        dynamic_batch: bool,
    ) -> None:
        self.live = unwrapped_copy(model).eval()
        self.folded = copy.deepcopy(self.live)
        fold_(self.folded)
        self.name, part = find_backbone(self.folded, backbone)
        self.left_out: dict[Format, str] = {}
        self.notes: list[str] = []
        self.free: dict[Format, Sequence[str]] = {}
        self.asked = formats is not None
        if formats is None:
            self.left_out = _not_applicable(part)
            formats = [name for name in FORMATS if name not in self.left_out]
        if hasattr(part, "merge_and_unload"):  # peft
            self.notes.append(
                f"the weights are those of a {type(part).__name__}, adapters apart: call its merge_and_unload() and "
                "export_model() for plain ones"
            )
        self.formats = [name for name in FORMATS if name in formats]
        if "huggingface" in formats and not is_hugging_face(part):
            raise ConfigurationError(
                f"huggingface does not apply: the backbone is {type(part).__name__}, no model of transformers; leave "
                "it out of --formats, or name another part with --backbone"
            )
        # A LightningModule whose author wrote no forward is run through its backbone.
        self.whole = _has_forward(self.folded)
        parameter = next(self.folded.parameters(), torch.empty(0))
        if parameter.device.type != "cpu":
            raise ConfigurationError(f"the model is on {parameter.device}: move it to the CPU with model.cpu()")
        self.tolerance = default_tolerance(parameter.dtype) if tolerance is None else tolerance
        self.dynamic = dynamic_batch
        self.example = find_example(self._target(self.live), example)
        if self.example is None and {"onnx", "pt2"} & set(self.formats):
            raise ConfigurationError(
                f"{type(model).__name__} does not say what it takes: give a batch with --data, an example_input_array "
                "to the class, or --formats safetensors"
            )
        self.batches = self._batches()
        self.expected = [self._run_live(batch) for batch in self.batches]
        self._require_comparable()
        self.others = self._no_tensors()
        self.lengths = Lengths([], self.tolerance, self._run_live)
        if self.example is not None and self.dynamic and {"onnx", "pt2"} & set(self.formats):
            self.lengths = Lengths([self.example], self.tolerance, self._run_live)

    def _target(self, model: nn.Module) -> nn.Module:
        return model if self.whole else model.get_submodule(self.name)

    def _batches(self) -> list[Sample]:
        if self.example is None:
            self.notes.append("outputs were not compared: there was no batch to run, --data gives one")
            return []
        size = batch_size(self.example)
        others = (1, size + 3) if self.dynamic else (size,)
        return [self.example, *(resized(self.example, other) for other in others)]

    def _require_comparable(self) -> None:
        name = type(self.live).__name__
        broken = [name for name, value in self.folded.named_parameters() if not bool(value.isfinite().all())]
        if broken and not self.batches:
            raise ConfigurationError(f"'{broken[0]}' of {name} holds NaN or infinities: export an earlier checkpoint")
        if broken:
            self.notes.append(f"{len(broken)} parameters hold NaN or infinities ('{broken[0]}', ...)")
        for batch, expected in zip(self.batches, self.expected, strict=True):
            if not expected:
                raise ConfigurationError(f"{name} returns no tensor, so that nothing could be compared")
            if not all(bool(tensor.isfinite().all()) for tensor in expected):
                why = (
                    f"as '{broken[0]}' does; export an earlier checkpoint" if broken else "give another one with --data"
                )
                if not all(bool(tensor.isfinite().all()) for tensor in tensors_in((batch.args, batch.kwargs))):
                    why = "and so does the example itself: give another one with --data"
                raise ConfigurationError(f"what {name} computes of the example holds NaN or infinities, {why}")
        for batch, expected in zip(self.batches[:1], self.expected, strict=False):
            if largest_difference(expected, self._run_live(batch)):
                raise ConfigurationError(
                    f"{name} computes something else at every call, so that nothing can be compared; turn off what is "
                    "random in its evaluation mode"
                )

    def _no_tensors(self) -> bool:
        """Whether the model returns more than tensors; notes say what."""
        if not {"onnx", "pt2"} & set(self.formats):
            return False
        target = self._target(self.live)
        with without_cache(target):
            others = list(others_in(self.batches[0].run(target)))
        with torch.no_grad():
            cached = dict(others_in(self.batches[0].run(target))).keys() - dict(others).keys()
        if cached:
            self.notes.append(f"graphs return no {', '.join(sorted(cached))} (use_cache=False)")
        names = [repr(name) for name, value in others if value is not None]
        if names:
            self.notes.append(
                f"outputs that are no tensors ({', '.join(names[:3])}) were not compared; model.onnx does not have them"
            )
        return bool(others)

    def _run_live(self, batch: Sample) -> list[Tensor]:
        return self._run(self._target(self.live), batch)

    @staticmethod
    def _run(model: nn.Module, batch: Sample) -> list[Tensor]:
        with without_cache(model):
            return [tensor.clone() for tensor in tensors_in(batch.run(model))]

    def write(self, name: Format, folder: Path) -> ExportedFile | None:
        """Write one format, read it back and compare.

        Returns:
            What was written; None if the format can not hold the model and was not asked for by name.

        Raises:
            ExportMismatchError: If it computes something else.
            UnfitFormatError: If the format can not hold the model and was asked for.
        """
        try:
            return self._write(name, folder / FILES[name])
        except UnfitFormatError as error:
            if self.asked:
                raise
            self.left_out[name] = error.reason
            for path in folder.glob(f"{FILES[name]}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            return None

    def _write(self, name: Format, path: Path) -> ExportedFile:
        run = getattr(self, f"_{name}")(path)
        if not self.batches:
            return ExportedFile(name, path.name, None)
        found = [run(batch) for batch in self.batches]
        for expected, outputs in zip(self.expected, found, strict=True):
            reason = structural_difference(expected, outputs)
            if reason:
                raise ExportMismatchError(
                    f"'{path.name}' does not compute what the model computes: {reason}; nothing was written: leave "
                    f"{name} out with --formats"
                )
        difference = max(largest_difference(a, b) for a, b in zip(self.expected, found, strict=True))
        if not difference <= self.tolerance:
            raise ExportMismatchError(self._mismatch(name, path.name, difference))
        return ExportedFile(name, path.name, difference, self.free.get(name, ()))

    def _mismatch(self, format_: Format, name: str, difference: float) -> str:
        moved = self._run(self._target(self.live), jittered(self.batches[0]))
        own = largest_difference(self.expected[0], moved)
        why = ""
        if own > self.tolerance:
            why = f"; the model's own outputs change by {own:.1e} where its input changes by one rounding"
            if any(token_forwards(self.folded)):
                why += ", as corrected tokens make it that span less than all directions"
        return (
            f"'{name}' does not compute what the model computes: outputs differ by {difference:.1e} of the largest "
            f"one, {self.tolerance:.1e} are allowed{why}; nothing was written: leave {format_} out with --formats, or "
            "accept it with --tolerance"
        )

    def _safetensors(self, path: Path) -> Runner:
        shared = write_safetensors(self.folded.get_submodule(self.name), path, {"lit_cond": __version__})
        if shared:
            self.notes.append(f"{path.name} holds {len(shared)} shared tensors twice ('{shared[0]}', ...)")
        fresh = copy.deepcopy(self.folded)
        read_safetensors(fresh.get_submodule(self.name), path)
        return lambda batch: self._run(self._target(fresh), batch)

    def _huggingface(self, path: Path) -> Runner:
        part = self.folded.get_submodule(self.name)
        write_huggingface(part, path)
        loaded = read_huggingface(part, path)
        if not self.name:
            return lambda batch: self._run(loaded, batch)
        fresh = copy.deepcopy(self.folded)
        parent, _, child = self.name.rpartition(".")
        setattr(fresh.get_submodule(parent), child, loaded)
        return lambda batch: self._run(self._target(fresh), batch)

    def _onnx(self, path: Path) -> Runner:
        target = with_products(self._target(self.folded))
        return self._graph("onnx", path, returning_tensors(target) if self.others else target, write_onnx, read_onnx)

    def _pt2(self, path: Path) -> Runner:
        return self._graph("pt2", path, self._target(self.folded), write_pt2, read_pt2)

    def _graph(
        self,
        name: Format,
        path: Path,
        target: nn.Module,
        write: Callable[[ExportedProgram, Path], None],
        read: Callable[[Path], Runner],
    ) -> Runner:
        """Write a graph, for sequences of other lengths as well where that is possible."""
        assert self.example is not None
        reason = self.lengths.reason
        if self.lengths.cases:
            try:
                program = self._program(target, dynamic_length=True)
                write(program, path)
                run = read(path)
                limits = self.lengths.limits(program, run, refuses=name == "pt2")
                self.free[name] = ("batch", limits)
                return run
            except UnfitFormatError as error:
                reason = error.reason
            path.unlink(missing_ok=True)
        write(self._program(target), path)
        self.free[name] = ("batch",) if self.dynamic else ()
        if reason:
            self.notes.append(f"{path.name} takes sequences of length {self.lengths.own} only: {reason}")
        return read(path)

    def _program(self, target: nn.Module, *, dynamic_length: bool = False) -> ExportedProgram:
        assert self.example is not None
        with without_cache(target):
            return to_program(target, self.example, dynamic_batch=self.dynamic, dynamic_length=dynamic_length)


def _has_forward(model: nn.Module) -> bool:
    """Whether the author of a model wrote a forward; LightningModule has one that raises."""
    return "lightning" not in type(model).forward.__module__.split(".")[0]


def _not_applicable(part: nn.Module) -> dict[Format, str]:
    if not is_hugging_face(part):
        return {"huggingface": f"the backbone is {type(part).__name__}, no model of transformers"}
    for name, _ in token_forwards(part):
        return {"huggingface": f"the tokens at '{name}' are corrected, which from_pretrained could not know"}
    return {}
