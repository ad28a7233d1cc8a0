"""Correcting embedded tokens where they enter the first block: `X -> X + strength * C(X)`.

The correction depends on the input, so it can not fold into weights. Its presence shows as one extra entry of the
block's `state_dict` (the strength, under `conditioned_tokens`), which makes a strict load into a plain model fail by
name.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.errors import ConfigurationError
from lit_cond.functional.tokens import is_prefix_safe, token_correction
from lit_cond.surgery.masks import cached_length, leaks_from_future, valid_tokens
from lit_cond.surgery.passes import Passes
from lit_cond.surgery.rules import TokenRule
from lit_cond.surgery.scope import InstanceForward, install, remove, wrappers
from lit_cond.surgery.strength_state import STATE_KEY, keep_in_state
from lit_cond.surgery.token_sites import TokenSite

__all__ = ["STATE_KEY", "TokenForward", "attach_tokens", "detach_tokens", "prepare_tokens", "token_forwards"]

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
        ConfigurationError: If the attention is causal and the correction looks at later tokens, or if the rule wants
            the learned tokens left out and no forward pass has shown how many there are.
    """

    def __init__(self, site: TokenSite, rule: TokenRule, strength: Tensor) -> None:
        super().__init__(site.module)
        self.name = site.name
        self.rule = rule
        self.strength = strength
        self.width = site.channels or site.attention.width
        self.batch_first = site.batch_first
        self.argument = site.argument
        self.axis = site.channel_axis
        self.joined = site.joined
        self.prefix = _prefix(site, rule)
        self.prefix_safe = is_prefix_safe(rule.correction, rule.scale)
        self.handles: list[Any] = []
        self.passes = Passes(site.scope_name) if site.scope is not None else None
        self._mask_seen = False
        # A pass has shown the axes that the block and its attention mean; without one the first call has to.
        mha = site.attention.module if site.argument is None else None
        self._unchecked = mha if isinstance(mha, nn.MultiheadAttention) else None
        self._last_output = _nothing()
        if site.causal and not self.prefix_safe:
            raise ConfigurationError(_CAUSAL_MESSAGE.format(name=site.name))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Correct the tokens and run the block.

        A block that is called again on its own output (layers that share weights, as in ALBERT) is not at the entrance
        any more: those tokens pass as they are.
        """
        place, tokens = self.find_tokens(args, kwargs)
        if self._has_entered(tokens):
            return self._remember(self.call_inner(*args, **kwargs))
        if self._unchecked is not None and not torch.compiler.is_compiling() and _batch_differs(tokens):
            return self._first_call(tokens, *args, **kwargs)
        corrected = self._correct_nested(tokens) if tokens.is_nested else self._correct_call(tokens, args, kwargs)
        if isinstance(place, str):
            kwargs = {**kwargs, place: corrected}
        else:
            args = (*args[:place], corrected, *args[place + 1 :])
        return self._remember(self.call_inner(*args, **kwargs))

    def _has_entered(self, tokens: Tensor) -> bool:
        """Whether these tokens have been through the block before.

        Raises:
            ConfigurationError: If it can not be told.
        """
        if self.passes is None:
            return self._last_output() is tokens
        if not self.passes.open and tokens.requires_grad and torch.is_grad_enabled():
            raise ConfigurationError(
                f"the block '{self.name}' is called several times in a pass, and was called outside of "
                f"'{self.passes.name}', as gradient checkpointing does, so which call is the first is not known; turn "
                "gradient checkpointing off for it"
            )
        return self.passes.open and self.passes.enter()

    def _correct_call(self, tokens: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if tokens.ndim == 2 or (tokens.ndim == 3 and tokens.shape[0] == 1):
            starts = self._arguments(args, kwargs).get("cu_seqlens")
            if isinstance(starts, Tensor):
                return self._correct_packed(tokens.flatten(0, -2), starts).view(tokens.shape)
        if self.joined and tokens.ndim == 3:
            raise ConfigurationError(
                f"the samples of a batch stand one behind the other in the tokens {tuple(tokens.shape)} at "
                f"'{self.name}', and no `cu_seqlens` says where each begins; choose other towers with `include`"
            )
        return self.correct(tokens, self.find_mask(args, kwargs, tokens))

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
        return {name: value for name, value in self.__dict__.items() if name != "_last_output"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _last_output=_nothing())

    def _names(self) -> list[str]:
        return list(inspect.signature(type(self.module).forward).parameters)[1:]

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._names(), args, strict=False)), **kwargs}

    def find_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor]:
        """Return where among the arguments the tokens are, and the tokens.

        Raises:
            ConfigurationError: If no argument is a floating-point tensor with the channels of the tokens.
        """
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        if self.argument is not None:
            # What was given by position in the traced pass may be given by name here.
            names = self._names()
            position = names.index(self.argument) if self.argument in names else self.argument
            name = names[position] if isinstance(position, int) and position < len(names) else position
            named = [(place, value) for place, value in named if place in (position, name)]
        for place, value in named:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            # From the end: where the batch has any size (torch.export), it is not asked whether it equals the width.
            if value.is_nested or self.width in value.shape[::-1]:
                return place, value
        where = "" if self.argument is None else f" as its argument {self.argument!r}"
        raise ConfigurationError(
            f"the block '{self.name}' got no floating-point tensor with {self.width} channels{where}; name another "
            "block with `include`"
        )

    def find_mask(self, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor) -> Tensor | None:
        """Return which tokens make up the matrices (batch, tokens), or None when all do.

        Padding, by the block's mask arguments, and the leading tokens that the rule leaves out do not.

        Raises:
            ConfigurationError: If a mask is not understood or shows that attention is causal, a cache hides earlier
                tokens, or tokens without an order have no leading ones.
        """
        named = self._arguments(args, kwargs)
        if not self.prefix_safe and not self._mask_seen:
            if leaks_from_future(named):
                raise ConfigurationError(_CAUSAL_MESSAGE.format(name=self.name))
            # Reading a mask waits for the device, so the first harmless one of more than one token decides.
            # Compiled code that got none would be compiled anew for having looked.
            masks = any(isinstance(value, Tensor) and value is not tokens for value in named.values())
            if masks or not torch.compiler.is_compiling():
                self._mask_seen = tokens.shape[1 if self.batch_first else 0] > 1
        if any(cached_length(named.get(name)) for name in ("cache", "past_key_values", "past_key_value", "layer_past")):
            raise ConfigurationError(
                f"the tokens at '{self.name}' are conditioned by their position in the sequence, which a cache of "
                "earlier tokens hides; generate with use_cache=False"
            )
        axis = self.channel_axis(tokens)
        if tokens.ndim != 3 or axis != 2:
            if self.prefix and tokens.ndim != 2:
                raise ConfigurationError(
                    f"the tokens {tuple(tokens.shape)} at '{self.name}' stand in a grid, where none of them lead; use "
                    "prefix_tokens=0"
                )
            every = torch.ones(1, tokens.shape[0], dtype=torch.bool, device=tokens.device)
            return self._behind_prefix(every) if self.prefix else None
        batch, length = tokens.shape[:2] if self.batch_first else (tokens.shape[1], tokens.shape[0])
        mask = valid_tokens(named, batch, length)
        if mask is None and self.prefix:
            mask = torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
        return None if mask is None else self._behind_prefix(mask)

    def _behind_prefix(self, valid: Tensor) -> Tensor:
        """Return a mask (batch, tokens) without the first real tokens of each sample, wherever padding puts them."""
        return valid & (valid.cumsum(dim=1) > self.prefix) if self.prefix else valid

    def channel_axis(self, tokens: Tensor) -> int:
        """Return the axis of the channels: the one that the rule names, that a pass has shown, or that has their size.

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
        if self.axis is not None and tokens.shape[self.axis] == self.width:
            return self.axis % tokens.ndim
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
        """Return the tokens as one matrix for each sample (batch, tokens, channels).

        What stands on the batch axis is a sample, also where a model has put parts of an image there (MobileViT, TNT).

        Raises:
            ConfigurationError: If they are a stack with something else than tokens before the batch.
        """
        moved = tokens.movedim(self.channel_axis(tokens), -1)
        if moved.ndim == 2:
            return moved.unsqueeze(0)
        if moved.ndim == 3 and not self.batch_first:
            return moved.transpose(0, 1)
        if not self.batch_first:
            raise ConfigurationError(
                f"the tokens {tuple(tokens.shape)} at '{self.name}' are a stack of several streams for each sample, "
                "which make no one matrix; name another block with `include`"
            )
        return moved.flatten(1, -2)

    def correct(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the corrected tokens in the shape and dtype of `tokens`.

        Args:
            tokens: The block's input, of any layout.
            mask: Which tokens are real (batch, tokens); None for all.
        """
        correction = self._correction(self.matrices(tokens), mask)
        moved = tokens.movedim(self.channel_axis(tokens), -1)
        if moved.ndim == 3 and not self.batch_first:
            correction = correction.transpose(0, 1)
        return self._add(tokens, correction.reshape(moved.shape).movedim(-1, self.channel_axis(tokens)))

    def _correction(self, matrices: Tensor, mask: Tensor | None) -> Tensor:
        """Return C for matrices (batch, tokens, channels)."""
        source = matrices.detach() if self.rule.detach else matrices
        return token_correction(
            source, mask, correction=self.rule.correction, scale=self.rule.scale, backend=self.rule.backend
        )

    def _add(self, tokens: Tensor, correction: Tensor) -> Tensor:
        if self.strength.device != tokens.device:
            self.to_(tokens.device)
        with torch.autocast(tokens.device.type, enabled=False):
            corrected = torch.addcmul(tokens.to(correction.dtype), correction, self.strength.to(correction.dtype))
        return corrected.to(tokens.dtype)

    def to_(self, device: torch.device) -> None:
        """Move the strength to the device of the tokens."""
        with torch.inference_mode(False):  # a tensor made under inference mode could not be changed any more
            self.strength = self.strength.to(device)

    def _correct_nested(self, tokens: Tensor) -> Tensor:
        """Correct sequences that `nn.TransformerEncoder` has packed without their padding."""
        corrected = self._correct_sequences(tokens.unbind())
        return torch.nested.as_nested_tensor(corrected)

    def _correct_packed(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Correct sequences that stand one behind the other (all tokens, channels).

        Args:
            tokens: The tokens.
            starts: Where each sequence starts, and the end of the last (sequences + 1,).
        """
        return torch.cat(self._correct_sequences(torch.split(tokens, starts.diff().tolist())))

    def _correct_sequences(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Correct sequences of different lengths, each (tokens, channels)."""
        padded = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        lengths = torch.tensor([len(s) for s in sequences], device=padded.device)
        mask = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        mask = self._behind_prefix(mask)
        corrected = self._add(padded, self._correction(padded, mask))
        return [c[: len(s)] for c, s in zip(corrected, sequences, strict=True)]


def _batch_differs(tokens: Tensor) -> bool:
    """Whether the first two axes of a stack of sequences can be told from each other by their sizes."""
    return not tokens.is_nested and tokens.ndim == 3 and tokens.shape[0] != tokens.shape[1]


def _nothing() -> weakref.ref[Tensor]:
    """Return a reference to a tensor that is gone; None in its place would be another thing to compiled code."""
    return weakref.ref(torch.empty(0))


def _prefix(site: TokenSite, rule: TokenRule) -> int:
    if rule.prefix_tokens != "auto":
        return rule.prefix_tokens
    if site.prefix is None:
        raise ConfigurationError(
            f"no forward pass has shown how many learned tokens stand first at '{site.name}'; give a number for "
            "`prefix_tokens`"
        )
    return site.prefix


def prepare_tokens(sites: Sequence[TokenSite], rule: TokenRule) -> list[tuple[TokenSite, TokenForward]]:
    """Return the corrections of several sites, before any of them changes the model.

    Raises:
        ConfigurationError: If the rule does not fit one of them.
    """
    prepared = []
    for site in sites:
        try:
            prepared.append((site, TokenForward(site, rule, torch.tensor(float(rule.strength)))))
        except ConfigurationError as error:
            others = [other.name for other in sites if not other.causal]
            if not (site.causal and others):
                raise
            raise ConfigurationError(f"{error}, or choose other towers: include={others!r}") from None
    return prepared


def attach_tokens(site: TokenSite, rule: TokenRule, forward: TokenForward | None = None) -> TokenForward:
    """Correct the tokens at a site from now on.

    Args:
        site: Where tokens enter.
        rule: The correction.
        forward: What `prepare_tokens` made of them; None makes it now.
    """
    if forward is None:
        forward = TokenForward(site, rule, torch.tensor(float(rule.strength)))
    install(forward)
    forward.handles = keep_in_state(site.module, forward)
    if forward.passes is not None and site.scope is not None:
        forward.handles += forward.passes.follow(site.scope)
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
