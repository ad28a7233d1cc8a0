"""What to do to a model, as plain values: validated when built, comparable, and writable into a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lit_cond.errors import ConfigurationError
from lit_cond.surgery.selection import Pattern
from lit_cond.surgery.sites import ROLES, Kind, Role

__all__ = ["Backend", "Rule", "Scale", "TokenCorrection", "TokenRule", "WeightCorrection", "WeightRule"]

Scale = float | Literal["spectral"]
WeightCorrection = Literal["spectral", "identity"]
Granularity = Literal["matrix", "head"]
TokenCorrection = Literal["exact", "identity"]
Backend = Literal["auto", "gram", "svd", "products"]


def _one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ConfigurationError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _number(name: str, value: object, *, zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigurationError(f"`{name}` must be a finite number, got {value!r}")
    if value < 0 or (value == 0 and not zero):
        raise ConfigurationError(f"`{name}` must be {'>= 0' if zero else '> 0'}, got {value!r}")


def _scale(value: object) -> None:
    if isinstance(value, str):
        _one_of("scale", value, ("spectral",))
    else:
        _number("scale", value, zero=False)


def _prefix(value: object) -> None:
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"`prefix_tokens` must be 'auto' or a whole number >= 0, got {value!r}")


def _axis(value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigurationError(f"`channel_axis` must be a whole number or None, got {value!r}")


def _frozen(pattern: Pattern) -> str | tuple[str, ...] | None:
    return pattern if pattern is None or isinstance(pattern, str) else tuple(pattern)


@dataclass(frozen=True)
class WeightRule:
    """Spectral conditioning of projection weights, `W -> W + strength * C` with a fixed C.

    Source: Saratchandran & Lucey, Spectral Conditioning of Attention, NeurIPS 2025.

    Args:
        correction: `"spectral"`: C is `scale` times the polar factor of W, so that every singular value grows by
            `scale` (Theorem 3.5: condition number at most 2 with scale `"spectral"`). `"identity"`: C is `scale`
            times the rectangular identity, the practical variant (the paper's scale is 10).
        scale: Size of C: a number, or `"spectral"` for the largest singular value of W.
        strength: The multiplier that a schedule moves, >= 0.
        granularity: Whether one C is made for the whole projection matrix or one for each head's rows. The paper does
            not say which it uses.
        roles: Which of the query, key and value matrices to correct; None for all.
        include: Which attention layers, in the grammar of `find_attention`.
        exclude: Which attention layers to leave out.
        layers: Which attention layers by position, from 0; negative ones count from the end; None for all.
        kinds: Which kinds of attention, as in `AttentionSite.kind`; None for all.

    Raises:
        ConfigurationError: If a value can not be used.
    """

    correction: WeightCorrection = "spectral"
    scale: Scale = "spectral"
    strength: float = 1.0
    granularity: Granularity = "matrix"
    roles: Sequence[Role] | None = None
    include: Pattern = None
    exclude: Pattern = None
    layers: Sequence[int] | None = None
    kinds: Sequence[Kind] | None = None

    def __post_init__(self) -> None:
        _one_of("correction", self.correction, get_args(WeightCorrection))
        _scale(self.scale)
        _number("strength", self.strength, zero=True)
        _one_of("granularity", self.granularity, get_args(Granularity))
        roles = ROLES if self.roles is None else tuple(self.roles)
        for role in roles:
            _one_of("roles", role, ROLES)
        if not roles:
            raise ConfigurationError("`roles` is empty; name query, key or value, or leave it out for all three")
        if self.layers is not None:
            for layer in self.layers:
                if not isinstance(layer, int) or isinstance(layer, bool):
                    raise ConfigurationError(f"`layers` must hold whole numbers, got {layer!r}")
            object.__setattr__(self, "layers", tuple(self.layers))
        if self.kinds is not None:
            for kind in self.kinds:
                _one_of("kinds", kind, get_args(Kind))
            object.__setattr__(self, "kinds", tuple(self.kinds))
        object.__setattr__(self, "roles", tuple(r for r in ROLES if r in roles))
        object.__setattr__(self, "include", _frozen(self.include))
        object.__setattr__(self, "exclude", _frozen(self.exclude))

    def settings(self) -> dict[str, Any]:
        """Return what decides the correction, without the strength, in types that a checkpoint may hold."""
        return _settings(self)


@dataclass(frozen=True)
class TokenRule:
    """Conditioned embedded tokens, `X -> X + strength * C(X)` before the first block, one matrix for each sample.

    Source: Saratchandran & Lucey, Conditioned Embedded Tokens, ICCV 2025.

    Args:
        correction: `"exact"`: C(X) is `scale` times the polar factor of X (condition number at most 2 with scale
            `"spectral"`); `"identity"`: `scale` times the rectangular identity.
        scale: Size of C: a number, or `"spectral"` for the largest singular value of X.
        strength: The multiplier that a schedule moves, >= 0.
        detach: Whether C(X) is a constant for the backward pass. The paper does not say; a constant is cheaper.
        backend: How the exact correction is computed; `"auto"` takes the cheapest for the shape.
        include: Names of the blocks whose input is corrected; None for the first block of each tower.
        channel_axis: Axis of the channels in the block's input; None to find it.
        prefix_tokens: How many leading tokens (class token, registers) stay out of the token matrix and uncorrected;
            `"auto"` for as many learned ones as a forward pass shows before those of the input. Padding in front does
            not count. Identity corrections count the tokens behind them from the first.

    Raises:
        ConfigurationError: If a value can not be used.
    """

    correction: TokenCorrection = "exact"
    scale: Scale = "spectral"
    strength: float = 1.0
    detach: bool = True
    backend: Backend = "auto"
    include: Pattern = None
    channel_axis: int | None = None
    prefix_tokens: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        _one_of("correction", self.correction, get_args(TokenCorrection))
        _scale(self.scale)
        _number("strength", self.strength, zero=True)
        _one_of("detach", self.detach, (True, False))
        _one_of("backend", self.backend, get_args(Backend))
        _axis(self.channel_axis)
        _prefix(self.prefix_tokens)
        object.__setattr__(self, "include", _frozen(self.include))

    def settings(self) -> dict[str, Any]:
        """Return what decides the correction, without the strength, in types that a checkpoint may hold."""
        return _settings(self)


Rule = WeightRule | TokenRule


def _settings(rule: Rule) -> dict[str, Any]:
    values = asdict(rule)
    del values["strength"]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
