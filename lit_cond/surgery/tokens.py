"""Correcting embedded tokens where they enter the first block: `X -> X + strength * C(X)`.

The correction depends on the input, so it can not fold into weights. Its presence shows as one extra entry of the
block's `state_dict` (the strength, under `conditioned_tokens`), which makes a strict load into a plain model fail by
name.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.errors import ConfigurationError
from lit_cond.functional.tokens import is_prefix_safe, token_correction
from lit_cond.surgery.masks import cached_length, leaks_from_future, valid_tokens
from lit_cond.surgery.rules import TokenRule
from lit_cond.surgery.scope import InstanceForward, install, remove, wrappers
from lit_cond.surgery.token_sites import TokenSite

__all__ = ["STATE_KEY", "TokenForward", "attach_tokens", "detach_tokens", "token_forwards"]

STATE_KEY = "conditioned_tokens"

_CAUSAL_MESSAGE = (
    "the correction of '{name}' would let a position see later tokens (its attention is causal); use "
    "correction='identity' with a numeric scale"
)


class TokenForward(InstanceForward):
    """Corrects the tokens that enter a block, then runs the block.

    Args:
        site: Where tokens enter.
        rule: The correction.
        strength: A tensor without axes that holds the multiplier.

    Raises:
        ConfigurationError: If the attention is causal and the correction looks at later tokens.
    """

    def __init__(self, site: TokenSite, rule: TokenRule, strength: Tensor) -> None:
        super().__init__(site.module)
        self.name = site.name
        self.rule = rule
        self.strength = strength
        self.width = site.attention.width
        self.batch_first = site.attention.batch_first
        self.prefix_safe = is_prefix_safe(rule.correction, rule.scale)
        self.handles: list[Any] = []
        self._mask_seen = False
        mha = site.attention.module
        self._unchecked = mha if isinstance(mha, nn.MultiheadAttention) else None
        self._last_output: weakref.ref[Tensor] | None = None
        if site.attention.causal and not self.prefix_safe:
            raise ConfigurationError(_CAUSAL_MESSAGE.format(name=site.name))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Correct the first floating-point tensor argument and run the block.

        A block that is called again on its own output (layers that share weights, as in ALBERT) is not at the
        entrance any
        more: those tokens pass as they are.
        """
        place, tokens = self.find_tokens(args, kwargs)
        if self._last_output is not None and self._last_output() is tokens:
            return self._remember(self.call_inner(*args, **kwargs))
        unlike = not tokens.is_nested and tokens.ndim == 3 and tokens.shape[0] != tokens.shape[1]
        if self._unchecked is not None and unlike and not torch.compiler.is_compiling():
            return self._first_call(tokens, *args, **kwargs)
        if tokens.is_nested:
            corrected = self._correct_nested(tokens)
        else:
            corrected = self.correct(tokens, self.find_mask(args, kwargs, tokens))
        if isinstance(place, str):
            kwargs = {**kwargs, place: corrected}
        else:
            args = (*args[:place], corrected, *args[place + 1 :])
        return self._remember(self.call_inner(*args, **kwargs))

    def _first_call(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Make sure that the block and its `nn.MultiheadAttention` mean the same axis by the batch.

        Raises:
            ConfigurationError: If the block turns its tokens round before attention.
        """

        def compare(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            query = inputs[0] if inputs else named["query"]
            if query.ndim == 3 and query.shape[:2] == (tokens.shape[1], tokens.shape[0]):
                raise ConfigurationError(
                    f"the block '{self.name}' swaps the batch and token axes before its nn.MultiheadAttention, so "
                    f"which is which is not known; build the attention with batch_first={not self.batch_first}"
                )

        mha, self._unchecked = self._unchecked, None
        handle = mha.register_forward_pre_hook(compare, with_kwargs=True) if mha is not None else None
        try:
            return self.run(*args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()

    def _remember(self, output: Any) -> Any:
        tokens = output[0] if isinstance(output, tuple) and output else output
        if isinstance(tokens, Tensor):
            self._last_output = weakref.ref(tokens)
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_output": None}

    def find_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor]:
        """Return where among the arguments the tokens are, and the tokens.

        Raises:
            ConfigurationError: If no argument is a floating-point tensor with the channels of the attention layer.
        """
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in named:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if value.is_nested or self.width in value.shape:
                return place, value
        raise ConfigurationError(
            f"the block '{self.name}' got no floating-point tensor with {self.width} channels; name another block "
            "with `include`"
        )

    def find_mask(self, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor) -> Tensor | None:
        """Return which tokens are real (batch, tokens) from the block's mask arguments, or None when all are."""
        names = list(inspect.signature(type(self.module).forward).parameters)[1:]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if not self.prefix_safe and not self._mask_seen:
            if leaks_from_future(named):
                raise ConfigurationError(_CAUSAL_MESSAGE.format(name=self.name))
            # Reading a mask waits for the device, so the first harmless one of more than one token decides.
            self._mask_seen = tokens.shape[1 if self.batch_first else 0] > 1
        if any(cached_length(named.get(name)) for name in ("cache", "past_key_values", "past_key_value", "layer_past")):
            raise ConfigurationError(
                f"the tokens at '{self.name}' are conditioned by their position in the sequence, which a cache of "
                "earlier tokens hides; generate with use_cache=False"
            )
        axis = self.channel_axis(tokens)
        if tokens.ndim != 3 or axis != 2:
            return None
        batch, length = tokens.shape[:2] if self.batch_first else (tokens.shape[1], tokens.shape[0])
        return valid_tokens(named, batch, length)

    def channel_axis(self, tokens: Tensor) -> int:
        """Return the axis of the channels, found by its size unless the rule names it.

        Raises:
            ConfigurationError: If two axes could be it, or the named one has another size.
        """
        given = self.rule.channel_axis
        if given is not None:
            axis = given % tokens.ndim
            if tokens.shape[axis] != self.width:
                raise ConfigurationError(
                    f"channel_axis={given} of the tokens {tuple(tokens.shape)} at '{self.name}' has not the layer's "
                    f"{self.width} channels"
                )
            return axis
        last = tokens.ndim - 1
        if tokens.ndim == 4 and tokens.shape[1] == tokens.shape[3] == self.width:
            raise ConfigurationError(
                f"axes 1 and 3 of the tokens {tuple(tokens.shape)} at '{self.name}' could both be the channels; say "
                "which with `channel_axis`"
            )
        if tokens.shape[last] == self.width:
            return last
        if tokens.ndim >= 3 and tokens.shape[1] == self.width:
            return 1
        raise ConfigurationError(
            f"no axis of the tokens {tuple(tokens.shape)} at '{self.name}' is known to hold the {self.width} "
            "channels; say which with `channel_axis`"
        )

    def matrices(self, tokens: Tensor) -> Tensor:
        """Return the tokens as one matrix for each sample (batch, tokens, channels)."""
        moved = tokens.movedim(self.channel_axis(tokens), -1)
        if moved.ndim == 2:
            return moved.unsqueeze(0)
        if moved.ndim == 3 and not self.batch_first:
            return moved.transpose(0, 1)
        return moved.flatten(1, -2)

    def correct(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the corrected tokens in the shape and dtype of `tokens`.

        Args:
            tokens: The block's input, of any layout.
            mask: Which tokens are real (batch, tokens); None for all.
        """
        matrices = self.matrices(tokens)
        source = matrices.detach() if self.rule.detach else matrices
        correction = token_correction(
            source, mask, correction=self.rule.correction, scale=self.rule.scale, backend=self.rule.backend
        )
        if self.strength.device != tokens.device:
            self.to_(tokens.device)
        moved = tokens.movedim(self.channel_axis(tokens), -1)
        if moved.ndim == 3 and not self.batch_first:
            correction = correction.transpose(0, 1)
        shaped = correction.reshape(moved.shape).movedim(-1, self.channel_axis(tokens))
        with torch.autocast(tokens.device.type, enabled=False):
            corrected = torch.addcmul(tokens.to(shaped.dtype), shaped, self.strength.to(shaped.dtype))
        return corrected.to(tokens.dtype)

    def to_(self, device: torch.device) -> None:
        """Move the strength to the device of the tokens."""
        with torch.inference_mode(False):  # a tensor made under inference mode could not be changed any more
            self.strength = self.strength.to(device)

    def _correct_nested(self, tokens: Tensor) -> Tensor:
        """Correct sequences that `nn.TransformerEncoder` has packed without their padding."""
        sequences = tokens.unbind()
        lengths = torch.tensor([len(s) for s in sequences], device=tokens.device)
        padded = torch.nested.to_padded_tensor(tokens, 0.0)
        mask = torch.arange(padded.shape[1], device=tokens.device) < lengths[:, None]
        corrected = self.correct(padded, mask)
        return torch.nested.as_nested_tensor([c[: len(s)] for c, s in zip(corrected, sequences, strict=True)])


class _SaveStrength:
    """State-dict hook: writes the strength under the block's prefix."""

    def __init__(self, target: TokenForward) -> None:
        self.target = target

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        state[prefix + STATE_KEY] = self.target.strength.detach().clone()


class _LoadStrength:
    """Load hook: takes the strength out of the incoming state, or reports it missing."""

    def __init__(self, target: TokenForward) -> None:
        self.target = target

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        value = state.pop(prefix + STATE_KEY, None)
        if value is not None:
            self.target.strength.fill_(float(value))
        elif strict:
            missing.append(prefix + STATE_KEY)


def attach_tokens(site: TokenSite, rule: TokenRule) -> TokenForward:
    """Correct the tokens at a site from now on."""
    forward = TokenForward(site, rule, torch.tensor(float(rule.strength)))
    install(forward)
    forward.handles = [
        site.module.register_state_dict_post_hook(_SaveStrength(forward)),  # type: ignore[no-untyped-call]
        site.module.register_load_state_dict_pre_hook(_LoadStrength(forward)),  # type: ignore[no-untyped-call]
    ]
    return forward


def detach_tokens(forward: TokenForward) -> None:
    """Stop correcting the tokens of a block."""
    remove(forward)
    for handle in forward.handles:
        handle.remove()


def token_forwards(model: nn.Module) -> Iterator[tuple[str, TokenForward]]:
    """Yield the token corrections below a module with the names of their blocks in it."""
    for name, module in model.named_modules():
        for forward in wrappers(module, TokenForward):
            yield name, forward
