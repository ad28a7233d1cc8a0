"""Single checks on numbers: what a projection did with a change, and how it stands in an operand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.conformance_oracle.records import Core, Operand, Use, differs, scale_of, tolerance
from scripts.conformance_oracle.weights import Change

__all__ = ["Projected", "channel_ratio", "evidence", "operand_changes", "projected", "same_values"]


class Projected:
    """What changed weights did to projections.

    Args:
        problem: What contradicts the description, empty if nothing does.
        rows: Rows of the change that were seen in the weight as it was used; None if nothing could be compared.
        values: Entries by which the projections changed, X * delta, in any order.
    """

    def __init__(self, problem: str, rows: int | None, values: Tensor) -> None:
        self.problem, self.rows, self.values = problem, rows, values


def projected(change: Change, before: Sequence[Use], after: Sequence[Use]) -> Projected:
    """Compare the projections by one parameter with and without a change of it.

    Each row of the change must be a row of the weight as the projection used it (so that the axes are the right way
    round), the projection must change in these output channels only, and by the product of its input and the change.

    Args:
        change: What was added, (rows, inputs).
        before: The projections without it.
        after: The projections with it, up to where the run ended.
    """
    values: list[Tensor] = []
    found: list[Tensor] = []
    for old, new in zip(before, after, strict=False):
        if old.function != new.function or old.output.shape != new.output.shape:
            break
        if not new.imagined and differs(new.inputs, old.inputs):
            break  # a later layer, which the change reached by another way
        if new.matrix is None or old.matrix is None or new.channel_axes is None:
            continue
        step = new.matrix - old.matrix
        rows = step.abs().amax(1) > tolerance(step.dtype) * max(scale_of(old.matrix), 1e-12)
        moved = new.channels_last(new.output) - old.channels_last(old.output)
        if moved.shape[1] != len(rows):
            continue
        if scale_of(moved[:, ~rows]) > 1e3 * tolerance(step.dtype) * max(scale_of(old.output), 1e-12):
            return Projected("the projection changes in other output channels than those of the rows", None, moved)
        if new.pointwise and new.inputs.shape[:-1].numel() == len(moved):  # no stride
            expected = new.inputs.reshape(-1, new.inputs.shape[-1]) @ step[rows].t()
            if differs(moved[:, rows], expected, 1e4 * tolerance(step.dtype)):
                return Projected(
                    "the projection does not change by the product of its input and the change", None, moved
                )
        values.append(moved[:, rows].flatten())
        found.append(step[rows])
    joined = torch.cat(values) if values else torch.empty(0)
    if not found:
        return Projected("", None, joined)
    problem, count = _match_rows(change.values, torch.cat(found))
    return Projected(problem, count, joined)


def _match_rows(wanted: Tensor, seen: Tensor) -> tuple[str, int | None]:
    """Look for rows (rows, inputs) among others, each up to one common factor."""
    if wanted.shape[1] != seen.shape[1]:
        return (
            f"the change has rows of {wanted.shape[1]} inputs, the weight as it is used has rows of {seen.shape[1]}",
            None,
        )
    directions = torch.nn.functional.normalize(wanted.double(), dim=1)
    cosines = torch.nn.functional.normalize(seen.double(), dim=1) @ directions.t()
    near = cosines > 1 - 1e-5  # also where a weight is used times a factor
    if wanted.shape[1] == 1:  # a single input has no direction: compare the numbers
        near = torch.isclose(seen.double(), wanted.double().t(), rtol=1e-5)
    if not bool(near.any(1).all()):
        return "the rows that change in the weight as it is used are not those of the change (axes swapped?)", None
    return "", int(near.any(0).sum())


def operand_changes(role: str, new: Core, base: Core) -> list[Tensor]:
    """Return by what the operands of a role changed."""
    return [a - b for a, b in zip(new.tensors(role), base.tensors(role), strict=True)]


def evidence(once: Sequence[Tensor], twice: Sequence[Tensor], values: Tensor) -> str:
    """Return how the change of the operands follows from that of the projection.

    Returns:
        `exact`: a rearrangement of X * delta times one factor; `linear`: twice the change of the weight has twice the
        effect; `nonlinear`: a normalization stands between.
    """
    tol = 1e4 * tolerance(once[0].dtype)
    if any(differs(b, 2 * a, tol) for a, b in zip(once, twice, strict=True)):
        return "nonlinear"
    return "exact" if any(same_values(values, step) for step in once) else "linear"


def same_values(values: Tensor, step: Tensor) -> bool:
    """Return whether two tensors hold the same non-zero entries times one factor, each repeated equally often."""
    tol = 1e4 * tolerance(step.dtype)
    ours, theirs = values.flatten().to(step), step.flatten()
    theirs = theirs[theirs.abs() > tol * scale_of(theirs) * 1e-3]
    ours = ours[ours.abs() > tol * scale_of(ours) * 1e-3]
    if not len(ours) or not len(theirs) or len(theirs) % len(ours):
        return False
    repeats = len(theirs) // len(ours)
    theirs = theirs.sort().values[::repeats]
    for sign in (1.0, -1.0):
        signed = (sign * ours).sort().values
        factor = theirs.norm() / signed.norm()
        if not differs(theirs, signed * factor, tol):
            return True
    return False


def channel_ratio(step: Tensor, operand: Operand) -> tuple[float, float] | None:
    """Return which share of an operand's contracted and of its free axis the change of one row reaches."""
    if operand.contracted is None or operand.free is None:
        return None
    touched = step.nan_to_num().abs() > tolerance(step.dtype) * max(scale_of(step), scale_of(operand.tensor))
    shares = []
    for axis in (operand.contracted, operand.free):
        along = touched.movedim(axis, 0).flatten(1).any(1)
        shares.append(float(along.float().mean()))
    return shares[0], shares[1]
