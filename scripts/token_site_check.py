"""Do the token sites that are found lie where embedded tokens enter?

For each model the places where embedded tokens enter were chosen by hand, from its source (see
`scripts/token_site_references.py`): the output of the embedding, or the input of block 0, with its layout and the
number of learned tokens in front. Random numbers, one for each sample, token behind the learned ones and channel, are
added there; and the same numbers by the token correction itself, at the site that was found, with its own idea of
argument, layout and prefix. The outputs of the model must be equal to the last bit, and differ from those of the plain
model.

Verdicts: `right`; `wrong`: another number of sites, or other outputs; `refused`: an error of lit_cond; `no input`: the
model does not run on its sample; `absent`: the library is not installed, or does not build the model.

Example:
    python scripts/token_site_check.py --out token_sites.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the zoo stands beside this script
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lit_cond.errors import LitCondError, NoMatchingTargetError  # noqa: E402
from lit_cond.surgery import TokenRule, TokenSite, find_attention, find_token_sites  # noqa: E402
from lit_cond.surgery.samples import Sample  # noqa: E402
from lit_cond.surgery.tokens import attach_tokens, detach_tokens  # noqa: E402

__all__ = ["Reference", "Verdict", "check_token_site"]

Place = int | str
# Where the letters stand: b batch, n tokens (h, w, t of a grid), c channels.
LAYOUTS = ("bnc", "nbc", "bhwc", "bchw", "bthwc")


@dataclass(frozen=True)
class Reference:
    """Where embedded tokens enter, chosen by hand.

    Args:
        module: Dotted name of a module.
        place: "output" for what it returns; else position or name of its argument.
        layout: Order of the axes: b batch, n tokens or h, w, t of a grid, c channels; "nc" for sequences of one length
            that stand one behind the other.
        prefix: Learned tokens that stand first.
        item: Which item of a tuple that the module returns.
        sequences: How many sequences stand one behind the other.
    """

    module: str
    place: Place = "output"
    layout: str = "bnc"
    prefix: int = 0
    item: int | None = None
    sequences: int = 1


@dataclass
class Verdict:
    """What came out for one model.

    Args:
        name: Name of the model.
        verdict: See above.
        reason: Why it is not right.
        sites: Names of the sites that were found.
        differences: Largest difference of outputs, one for each site; 0.0 if it is right.
        effects: Largest change of outputs by the random numbers, one for each site.
    """

    name: str = ""
    verdict: Literal["right", "wrong", "refused", "no input", "absent"] = "right"
    reason: str = ""
    sites: list[str] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    effects: list[float] = field(default_factory=list)


def check_token_site(model: nn.Module, samples: Sequence[Sample], reference: Sequence[Reference]) -> Verdict:
    """Compare the token sites of a model with places chosen by hand.

    Args:
        model: The model, in evaluation mode.
        samples: What to call it with.
        reference: The places, one for each tower, in any order; empty for a model into which no tokens enter.
    """
    verdict = Verdict()
    try:
        sites = find_token_sites(model, sample=list(samples))
    except LitCondError as error:
        verdict.reason = f"{type(error).__name__}: {error}"
        none = (
            isinstance(error, NoMatchingTargetError) and not reference and find_attention(model, sample=list(samples))
        )
        verdict.verdict = "right" if none else "refused"
        return verdict
    verdict.sites = [site.name for site in sites]
    if len(sites) != len(reference):
        verdict.verdict, verdict.reason = "wrong", f"{len(sites)} sites, {len(reference)} places by hand"
        return verdict
    plain = _outputs(model, samples)
    left = [(entry, _at_reference(model, samples, entry)) for entry in reference]
    for site in sites:
        try:
            ours = _at_site(model, samples, site)
        except LitCondError as error:
            verdict.verdict, verdict.reason = "refused", f"{type(error).__name__}: {error}"
            return verdict
        verdict.effects.append(_difference(ours, plain))
        best = min(left, key=lambda pair: _difference(ours, pair[1]))
        verdict.differences.append(_difference(ours, best[1]))
        left.remove(best)
        if verdict.effects[-1] == 0 or verdict.differences[-1] != 0:
            verdict.verdict = "wrong"
            verdict.reason = f"'{site.name}' differs from {best[0].module} by {verdict.differences[-1]:.3g}"
    return verdict


def _noise(shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _at_site(model: nn.Module, samples: Sequence[Sample], site: TokenSite) -> list[Tensor]:
    """Return the outputs when the token correction at a site adds random numbers."""

    def add(tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        noise = _noise(tokens.shape).to(tokens.dtype)
        return noise if mask is None else noise * mask[..., None]

    # The identity with a numeric scale is allowed for causal attention too.
    forward = attach_tokens(site, TokenRule("identity", scale=1.0, prefix_tokens="auto"))
    try:
        with mock.patch("lit_cond.surgery.tokens.token_correction", add):
            return _outputs(model, samples)
    finally:
        detach_tokens(forward)


def _at_reference(model: nn.Module, samples: Sequence[Sample], entry: Reference) -> list[Tensor]:
    """Return the outputs when random numbers are added at a place chosen by hand, once in each pass."""
    module = model.get_submodule(entry.module)
    calls = [0]

    def first() -> bool:
        calls[0] += 1
        return calls[0] == 1

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not first():
            return None
        if entry.item is None:
            return _disturbed(output, entry)
        items = list(output)
        items[entry.item] = _disturbed(items[entry.item], entry)
        return tuple(items)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not first():
            return None
        if isinstance(entry.place, str):
            return args, {**kwargs, entry.place: _disturbed(kwargs[entry.place], entry)}
        changed = list(args)
        changed[entry.place] = _disturbed(changed[entry.place], entry)
        return tuple(changed), kwargs

    if entry.place == "output":
        handle = module.register_forward_hook(after)
    else:
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        return _outputs(model, samples, lambda: calls.__setitem__(0, 0))
    finally:
        handle.remove()


def _disturbed(tokens: Tensor, entry: Reference) -> Tensor:
    if entry.layout == "nc":
        noise = _noise((entry.sequences, tokens.shape[0] // entry.sequences, tokens.shape[1]))
        return tokens + noise.reshape(tokens.shape)
    grid = [axis for axis, letter in enumerate(entry.layout) if letter not in "bc"]
    order = [entry.layout.index("b"), *grid, entry.layout.index("c")]
    moved = tokens.permute(order)
    noise = _noise((moved.shape[0], moved[0, ..., 0].numel(), moved.shape[-1])).to(tokens.dtype)
    noise[:, : entry.prefix] = 0
    back = [order.index(axis) for axis in range(len(order))]
    return tokens + noise.reshape(moved.shape).permute(back)


@torch.no_grad()
def _outputs(model: nn.Module, samples: Sequence[Sample], begin: Any = lambda: None) -> list[Tensor]:
    found: list[Tensor] = []
    with _quiet():
        for sample in samples:
            begin()
            torch.manual_seed(0)
            found += [t for t in _tensors(sample.run(model)) if t.is_floating_point()]
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Take no fused path, which hooks on modules would switch off."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    if [t.shape for t in a] != [t.shape for t in b]:
        return float("inf")
    return max((float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if x.numel()), default=0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all models; return 1 if anything is wrong, else 0."""
    from scripts.token_site_references import cases

    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of JSON that the results are written to")
    parser.add_argument("--report", type=Path, help="write a report in Markdown here")
    parser.add_argument("--only", default=".*", help="regular expression that the model's name matches in full")
    options = parser.parse_args(arguments)
    results = []
    for case in cases():
        if not re.fullmatch(options.only, case.name):
            continue
        result = case.check(check_token_site)
        result.name = case.name
        results.append(result)
        numbers = " ".join(f"{value:g}" for value in result.differences)
        print(f"{case.name:42} {result.verdict:9} {', '.join(result.sites)}  {numbers}  {result.reason}", flush=True)
    counts = Counter(result.verdict for result in results)
    total = sum(len(result.sites) for result in results if result.verdict == "right")
    print(f"\n{dict(counts)}; {total} sites right, of {len(results)} models", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    if options.report is not None:
        options.report.write_text(markdown(results), encoding="utf-8")
    return int(counts["wrong"] > 0)


def markdown(results: Sequence[Verdict]) -> str:
    """Return a report with versions and date."""
    versions = []
    for name in ("torch", "transformers", "timm", "torchvision", "detectron2"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    counts = Counter(result.verdict for result in results)
    sites = sum(len(result.sites) for result in results if result.verdict == "right")
    totals = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [
        "# Where embedded tokens enter: what is found against what was chosen by hand",
        "",
        f"{datetime.date.today().isoformat()}, {', '.join(versions)}.",
        "Made by `scripts/token_site_check.py`, which says how.",
        "",
        f"{len(results)} models: {totals}; {sites} sites right.",
        "",
        "| model | verdict | sites | largest difference of outputs |",
        "| --- | --- | --- | --- |",
    ]
    for result in results:
        names = ", ".join(f"`{name}`" for name in result.sites) or "none"
        numbers = ", ".join(f"{value:g}" for value in result.differences) or "-"
        lines.append(f"| {result.name} | {result.verdict} | {names} | {numbers} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
