"""Whether a graph computes what the model computes for sequences of other lengths than the example's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.export import ExportedProgram

from lit_cond.export.compare import largest_difference
from lit_cond.export.example import relengthed, sequences
from lit_cond.export.formats import UnfitFormatError
from lit_cond.export.graph import Runner, length_range
from lit_cond.surgery.samples import Sample

__all__ = ["Lengths"]

_ADVICE = "give an example of the length that you need with --data"


class Lengths:
    """The lengths of sequences on which a model and its graphs are compared.

    Args:
        examples: The batch, or nothing where lengths stay as they are.
        tolerance: How far outputs may differ, in parts of the largest one.
        run: Runs the model.
    """

    def __init__(self, examples: Sequence[Sample], tolerance: float, run: Callable[[Sample], list[Tensor]]) -> None:
        self.tolerance, self._run = tolerance, run
        self._example = next((example for example in examples if sequences(example)), None)
        self.own = sequences(self._example)[0].shape[1] if self._example is not None else 0
        self.cases = [case for change in (-3, 3) if (case := self._at(self.own + change)) is not None]
        self.reason = "the model takes no other length" if self.own and not self.cases else ""

    def _at(self, length: int) -> tuple[int, Sample, list[Tensor]] | None:
        """Return a batch of another length and what the model computes of it; None if it takes none."""
        length = max(1, length)
        if self._example is None or length == self.own:
            return None
        batch = relengthed(self._example, length - self.own)
        try:
            expected = self._run(batch)
        except Exception:  # whatever a foreign forward raises for a length that it does not take
            return None
        return (length, batch, expected) if all(bool(tensor.isfinite().all()) for tensor in expected) else None

    def limits(self, program: ExportedProgram, run: Runner, *, refuses: bool) -> str:
        """Check a graph for other lengths.

        Args:
            program: The graph.
            run: Runs its file.
            refuses: Whether the file itself refuses lengths that it was not made for.

        Returns:
            The lengths that it is right for, in words.

        Raises:
            UnfitFormatError: If it is right for one length only.
        """
        found = length_range(program)
        if found is None:
            raise UnfitFormatError("torch.export finds no other length possible", _ADVICE)
        lower, upper = found
        inside = [case for case in self.cases if lower <= case[0] and (upper is None or case[0] <= upper)]
        if not inside:
            raise UnfitFormatError("no other length could be checked", _ADVICE)
        for length, batch, expected in inside:
            difference = largest_difference(expected, run(batch))
            if not difference <= self.tolerance:
                raise UnfitFormatError(f"for length {length} it would differ by {difference:.1e}", _ADVICE)
        for length in [] if refuses else [lower - 1, *([] if upper is None else [upper + 1])]:
            case = self._at(length) if length > 0 else None
            if case is not None and not self._right_or_refused(run, case):
                raise UnfitFormatError(f"for length {length} it would compute something else without an error", _ADVICE)
        return f"length ({lower} {'or more' if upper is None else f'to {upper}'})"

    def _right_or_refused(self, run: Runner, case: tuple[int, Sample, list[Tensor]]) -> bool:
        try:
            return largest_difference(case[2], run(case[1])) <= self.tolerance
        except UnfitFormatError:
            return True
