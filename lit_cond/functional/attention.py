"""What a query and a key weight do to the softmax, before any data is seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_cond.errors import ConfigurationError

__all__ = ["predicted_attention_entropy"]


def predicted_attention_entropy(
    query: Tensor,
    key: Tensor,
    num_heads: int,
    num_tokens: int = 64,
    normalized: bool = False,
    seed: int = 0,
    num_sequences: int = 8,
) -> float:
    r"""Return the mean entropy, in nats, of the attention that the weights give LayerNorm'd Gaussian tokens.

    The mean over heads and tokens of the entropy of ``softmax(x Wq^T (x Wk^T)^T / sqrt(d))``, without biases,
    position encodings or masks. Uniform attention has ``log(num_tokens)``; a value near 0 means that each
    token attends to one other token or itself and the softmax passes hardly any gradient. Deterministic; the
    global random state is not used.

    Args:
        query: Weight of shape (num_heads * head_dim, width).
        key: Weight of shape (num_key_heads * head_dim, width), where num_key_heads divides num_heads.
        num_heads: Number of query heads.
        num_tokens: Length of each sequence.
        normalized: Divide by ``log(num_tokens)``, so that uniform attention has 1.
        seed: Seed of the tokens.
        num_sequences: Number of sequences to average over.

    Returns:
        The entropy; NaN if the weights hold a NaN or an infinity.

    Raises:
        ConfigurationError: The shapes do not fit each other or ``num_heads``.
    """
    if num_tokens < 2 or num_sequences < 1:
        raise ConfigurationError(
            f"num_tokens={num_tokens}, num_sequences={num_sequences} leave nothing to attend to; give at least 2 and 1."
        )
    if query.ndim != 2 or key.ndim != 2 or query.shape[1] != key.shape[1]:
        raise ConfigurationError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} are no weights of one attention layer; "
            "give two (out_features, in_features) matrices of equal in_features."
        )
    if num_heads < 1 or query.shape[0] % num_heads:
        raise ConfigurationError(
            f"{query.shape[0]} query rows can not be cut into num_heads={num_heads} heads; give a divisor."
        )
    head_dim = query.shape[0] // num_heads
    key_heads, rest = divmod(key.shape[0], head_dim)
    if rest or key_heads < 1 or num_heads % key_heads:
        raise ConfigurationError(
            f"{key.shape[0]} key rows do not hold heads of {head_dim} rows whose number divides "
            f"num_heads={num_heads}; give the key weight of the same layer."
        )
    generator = torch.Generator().manual_seed(seed)
    width = query.shape[1]
    tokens = torch.randn(num_sequences, 1, num_tokens, width, generator=generator).to(query.device)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        x = torch.nn.functional.layer_norm(tokens, (width,))
        q = x @ query.float().reshape(num_heads, head_dim, width).mT
        k = x @ key.to(query.device).float().reshape(key_heads, head_dim, width).mT
        k = k.repeat_interleave(num_heads // key_heads, dim=1)
        log_p = (q @ k.mT / math.sqrt(head_dim)).log_softmax(dim=-1)
        # p log p by p -> 0: a probability that underflows has a finite logarithm here, unlike with
        # log(softmax).
        entropy = -(log_p.exp() * log_p).sum(dim=-1).mean().item()
    return entropy / math.log(num_tokens) if normalized else entropy
