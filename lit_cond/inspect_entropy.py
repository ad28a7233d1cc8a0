"""What the softmax of an attention layer does before training: how widely it looks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_cond.errors import ConfigurationError
from lit_cond.functional.attention import predicted_attention_entropy
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.sites import AttentionSite

__all__ = ["COLLAPSED", "PROBE_TOKENS", "Softmax", "predicted"]

COLLAPSED = 0.25
"""Share of the entropy of uniform attention below which the softmax hardly looks beyond one token."""

PROBE_TOKENS = 64
"""Tokens of the sequences for which the entropy is predicted."""

# Over 12 heads of 64 tokens the means of two sequences and of eight differ by about a hundredth.
_SEQUENCES = 2


@dataclass(frozen=True)
class Softmax:
    """The attention of one layer, mean over samples, heads and tokens.

    Args:
        entropy: Entropy of a row of the softmax matrix in nats.
        share: The same as a share of the entropy of uniform attention over as many tokens as may be seen, in [0, 1].
        source: What it was computed for: LayerNorm'd Gaussian tokens ("predicted"), the input that the model itself
            says it takes ("sample"), or data of the user ("data").
        saturated: Share of rows whose largest probability is at least 0.99; None where it is predicted.
        lowest: Smallest share among the heads; None where it is predicted.
    """

    entropy: float
    share: float
    source: Literal["predicted", "sample", "data"]
    saturated: float | None = None
    lowest: float | None = None

    @property
    def collapsed(self) -> bool:
        """Whether the softmax is saturated."""
        return self.share < COLLAPSED


def predicted(site: AttentionSite) -> Softmax | str:
    """Predict the attention of a layer from its query and key matrices as the forward pass reads them.

    The tokens are independent, which is the hard case: see `predicted_attention_entropy`. Biases, positions, masks and
    a normalisation of queries and keys are left out.

    Args:
        site: The layer.

    Returns:
        The attention, or why it can not be predicted.
    """
    if site.kind != "self":
        return f"not predicted for {site.kind} attention"
    query, key = site.matrix_view("query"), site.matrix_view("key")
    if query is None or key is None:
        return "not predicted without exactly one query and one key matrix"
    if not site.num_heads:
        return "not predicted without the number of heads"
    try:
        entropy = predicted_attention_entropy(
            effective_matrix(query).float(),
            effective_matrix(key).float(),
            site.num_heads,
            PROBE_TOKENS,
            num_sequences=_SEQUENCES,
        )
    except ConfigurationError as error:
        return f"not predicted: {error}"
    return Softmax(entropy, entropy / math.log(PROBE_TOKENS), "predicted")
