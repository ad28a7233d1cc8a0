"""All quantities of one measured step of training: which are due, where to look, what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import torch

from lit_cond.errors import ConfigurationError, LitCondError
from lit_cond.measuring.collection import Collection, layer_key
from lit_cond.measuring.observe import ObservedAttention, why_not
from lit_cond.measuring.probes import AttentionProbe, InputProbe, Probe, sites_by_module
from lit_cond.measuring.quantities import (
    attention_spectra,
    bounds,
    entropy_numbers,
    finite_mean,
    jacobian_spectra,
    score_spectra,
    spectra_of_each,
)
from lit_cond.measuring.token_matrices import token_matrices
from lit_cond.measuring.weights import measure_weights
from lit_cond.surgery.sites import ROLES, AttentionSite
from lit_cond.surgery.token_sites import TokenSite

__all__ = ["FACTORS", "OBSERVED", "QUANTITIES", "MeasuredStep", "MeasuringSettings", "Quantity"]

Quantity = Literal["query", "key", "value", "tokens", "entropy", "scores", "attention", "jacobian", "jacobian_bound"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
OBSERVED: tuple[Quantity, ...] = ("entropy", "scores", "attention", "jacobian", "jacobian_bound")
"""The quantities for which attention is looked at while it runs."""

_ENTROPIES = ("entropy", "entropy_share", "saturated")
# The factors of the bound; that of the softmax is the one over its range, since the other is always infinite.
FACTORS = ("tokens", "query", "key", "value", "scores", "softmax_derivative")
_ATTRIBUTES = {"softmax_derivative": "softmax_derivative_nonzero"}


@dataclass(frozen=True)
class MeasuringSettings:
    """What is measured of a quantity that is due.

    Args:
        statistics: Numbers beside condition numbers.
        raw: Whether to measure also without corrections.
        per_head: Whether numbers of single heads are kept.
        max_samples: Samples of a batch that tokens and entropy look at.
        matrix_samples: Samples that scores, attention and Jacobians look at.
        max_queries: Queries of a sample that scores and entropy look at.
        jacobian_rows: Outputs (tokens times channels) of a head whose Jacobian is measured.
    """

    statistics: tuple[str, ...]
    raw: bool
    per_head: bool
    max_samples: int
    matrix_samples: int
    max_queries: int
    jacobian_rows: int


class MeasuredStep:
    """Measures the quantities that are due in one step.

    Args:
        sites: The attention layers.
        token_sites: Where tokens enter.
        due: The quantities.
        full: Whether all singular values of weights are computed.
        settings: What of them.

    Attributes:
        found: The numbers.
        failures: Why a quantity of a layer has none.
        seconds: Time that looking at the forward pass took.
    """

    def __init__(
        self,
        sites: Sequence[AttentionSite],
        token_sites: Sequence[TokenSite],
        due: frozenset[str],
        full: bool,
        settings: MeasuringSettings,
    ) -> None:
        self.sites = sites
        self.token_sites = token_sites
        self.due = due
        self.full = full
        self.settings = settings
        self.found = Collection(settings.per_head)
        self.failures: dict[tuple[str, str], Exception] = {}
        self.seconds = 0.0
        self._seen: set[tuple[str, str]] = set()
        self.found.skipped.update((quantity, 0.0) for quantity, _ in self.pairs())

    def measure_weights(self) -> None:
        """Measure the weights that are due; in every process."""
        roles, settings = [role for role in ROLES if role in self.due], self.settings
        if not roles:
            return
        sites = []
        for site in self.sites:
            try:
                for _, view in site:
                    view.as_read()
            except LitCondError as error:
                self._failed(roles, [site.name])(error)
            else:
                sites.append(site)
        measure_weights(self.found, sites, roles, raw=settings.raw, full=self.full, statistics=settings.statistics)

    def probes(self) -> Iterator[Probe]:
        """Yield what has to look at the forward pass of this step."""
        if "tokens" in self.due:
            for token_site in self.token_sites:
                failed = self._failed(["tokens"], [token_site.name])
                yield InputProbe(token_site.module, partial(self._see_tokens, token_site), failed)
        observed = [quantity for quantity in OBSERVED if quantity in self.due]
        if not observed:
            return
        samples = self.settings.max_samples if "entropy" in self.due else self.settings.matrix_samples
        for group in sites_by_module(site for site in self.sites if self._can_be_observed(site, observed)):
            failed = self._failed(observed, [site.name for site in group])
            yield AttentionProbe(group, self._see_attention, failed, samples, self.settings.matrix_samples)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each quantity of samples that is due with each of its layers, the same in every process."""
        if "tokens" in self.due:
            yield from (("tokens", site.name) for site in self.token_sites)
        yield from ((quantity, site.name) for quantity in OBSERVED if quantity in self.due for site in self.sites)

    def expected(self) -> list[str]:
        """Return the keys of the numbers of samples that may come out, the same ones in every process."""
        keys = []
        for quantity, layer in self.pairs():
            if quantity == "entropy":
                names = [f"{name}/scores" for name in _ENTROPIES]
            elif quantity == "jacobian_bound":
                names = ["cond/jacobian_bound", *(f"bound/{name}" for name in FACTORS)]
            else:
                names = [f"{name}/{quantity}" for name in ("cond", "cond_raw", *self.settings.statistics)]
            keys += [f"{name}/{layer_key(layer)}" for name in names]
        return keys

    def absent(self) -> dict[tuple[str, str], Exception]:
        """Return the layers that have no number though nothing failed, as those that were skipped at random."""
        found: dict[tuple[str, str], Exception] = {
            (quantity, layer): ConfigurationError(f"'{layer}': it did not run in this step, or had no tokens")
            for quantity, layer in self.pairs()
            if (quantity, layer) not in self._seen and (quantity, layer) not in self.failures
        }
        for site, role in product(self.sites, ROLES):
            if role in self.due and not site.views.get(role):
                reason = site.notes.get(role, "it has none")
                found[role, site.name] = ConfigurationError(f"'{site.name}': no matrix makes its {role}: {reason}")
        return found

    def _can_be_observed(self, site: AttentionSite, observed: Sequence[str]) -> bool:
        reason = why_not(site)
        if reason is not None:
            self._failed(observed, [site.name])(ConfigurationError(f"'{site.name}': {reason}"))
        return reason is None

    def _failed(self, quantities: Sequence[str], layers: Sequence[str]) -> Callable[[Exception], None]:
        def note(error: Exception) -> None:
            for pair in product(quantities, layers):
                if pair not in self._seen:
                    self.failures.setdefault(pair, error)

        return note

    def _see_tokens(self, site: TokenSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        start, settings = time.perf_counter(), self.settings
        tokens = token_matrices(site, args, kwargs, settings.max_samples, settings.raw)
        self.found.matrices("tokens", site.name, [[s] for s in spectra_of_each(tokens.read)], settings.statistics)
        if tokens.raw:
            self.found.add(
                "cond_raw", "tokens", site.name, finite_mean(s.condition for s in spectra_of_each(tokens.raw))
            )
        self._saw("tokens", site.name, len(tokens.read), tokens.skipped)
        self.seconds += time.perf_counter() - start

    def _see_attention(self, observed: ObservedAttention) -> None:
        start = time.perf_counter()
        for quantity in OBSERVED:
            if quantity not in self.due:
                continue
            try:
                count = self._measure(quantity, observed)
            except LitCondError as error:
                self.failures.setdefault((quantity, observed.site.name), error)
            else:
                self._saw(quantity, observed.site.name, count, observed.skipped)
        self.seconds += time.perf_counter() - start

    def _saw(self, quantity: str, layer: str, samples: int, skipped: int) -> None:
        if samples:
            self._seen.add((quantity, layer))
        self.found.skipped[quantity] = max(self.found.skipped[quantity], float(skipped))

    def _measure(self, quantity: str, observed: ObservedAttention) -> int:
        """Measure one quantity of a layer and return of how many samples."""
        layer, settings = observed.site.name, self.settings
        if quantity == "entropy":
            numbers = [entropy_numbers(sample, settings.max_queries) for sample in observed.samples]
            for name in _ENTROPIES if numbers else ():
                self.found.heads(name, "scores", layer, torch.stack([n[name] for n in numbers], dim=1).tolist())
            return len(numbers)
        samples = observed.samples[: settings.matrix_samples]
        if quantity == "jacobian_bound":
            found = [bounds(observed, sample, settings.max_queries) for sample in samples]
            by_head = list(zip(*found, strict=True))
            if not found:
                return 0
            self.found.heads("cond", quantity, layer, [[b.bound_nonzero for b in head] for head in by_head])
            for name in FACTORS:
                values = [[float(getattr(b, _ATTRIBUTES.get(name, name))) for b in head] for head in by_head]
                self.found.heads("bound", name, layer, values)
            return len(samples)
        if quantity == "jacobian":
            spectra = [jacobian_spectra(observed, sample, settings.jacobian_rows) for sample in samples]
        elif quantity == "scores":
            spectra = [score_spectra(sample, settings.max_queries) for sample in samples]
        else:
            spectra = [attention_spectra(observed, sample) for sample in samples]
        self.found.matrices(quantity, layer, spectra, settings.statistics)
        return len(samples)
