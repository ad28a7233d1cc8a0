"""The numbers of ``python -m lit_cond inspect``: a model before training, and what each correction would make of it.

    nn.Module -> numbers -> text, JSON. Imports functional, surgery and measuring. The model stays as it was.

| module | what it does |
| --- | --- |
| `weights.py` | query, key and value matrices: condition number, stable rank, and what a correction would leave |
| `tokens.py` | the same for the tokens that enter |
| `attention.py` | how widely the softmax looks: watched in a forward pass, predicted where that is not possible |
| `numbers.py` | all of it, as the model is and under each correction |
| `table.py`, `as_json.py` | as lines of text, as plain values |
| `data.py` | one batch from a file |
"""
