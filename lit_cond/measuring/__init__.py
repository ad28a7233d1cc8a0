"""From a running model to numbers: what attention computes, seen where it is computed and measured on the side.

    nn.Module -> numbers. No Lightning. Imports functional and surgery. Changes nothing in the model.

| module | what it does |
| --- | --- |
| `watch.py` | a `TorchFunctionMode`: sees queries, keys, values and the softmax of one call of an attention module |
| `flows.py` | what has reached a tensor on the way: projections, scores, softmaxes |
| `multihead.py` | the same for `F.multi_head_attention_forward`, whose inside is one function |
| `heads.py` | operands of any layout as (samples, heads, tokens, channels), and which tokens are real |
| `observe.py` | one attention layer as it ran: `ObservedAttention` |
| `head_inputs.py` | the tokens that a head projects, for its Jacobian |
| `maps.py` | rotary positions and normalisations between projection and attention, as a matrix for each token |
| `probes.py` | what looks at the first call of a module, for one step |
| `install.py` | probes on a model, compiled or not; `observe_forward` for a single forward pass |
| `quantities.py` | condition numbers, spectra and entropies of what was observed |
| `collection.py` | these numbers by log key, and what is said of all layers together |
"""
