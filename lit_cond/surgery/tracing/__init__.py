"""Finding attention by what a model computes: one forward pass is recorded, names play no part."""
