"""What finding and conditioning the attention of a model costs once, before training: seconds and memory.

    python scripts/benchmark_setup.py

Each part is run several times on a new model; the smallest time is printed, with the peak of the process's memory above
what the model itself takes. The model on the meta device is served by the table of layouts; the others run one small
forward pass.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Callable

import timm
import torch
import transformers
from torch import nn

from lit_cond.surgery import WeightRule, condition_, find_attention
from lit_cond.surgery.survey import survey_attention

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def vit_b() -> nn.Module:
    """Return a ViT-B/16 with random weights."""
    model: nn.Module = timm.create_model("vit_base_patch16_224")
    return model


def llama(device: str) -> nn.Module:
    """Return a Llama of 1.2 billion parameters."""
    config = transformers.AutoConfig.for_model("llama", **LLAMA_1B)
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def peak() -> float:
    """Return the largest resident size of this process so far in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(
    make: Callable[[], nn.Module], parts: dict[str, Callable[[nn.Module], object]], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each part, run one after the other on a new model in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        model = make()
        for name, part in parts.items():
            start = time.perf_counter()
            part(model)
            seconds[name].append(time.perf_counter() - start)
        del model
        gc.collect()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each part is run")
    parser.add_argument("--traced-llama", action="store_true", help="also trace the Llama with real weights (5 GiB)")
    options = parser.parse_args()
    jobs: dict[str, tuple[Callable[[], nn.Module], dict[str, Callable[[nn.Module], object]]]] = {
        "ViT-B/16": (
            vit_b,
            {
                "find (traced)": find_attention,
                "condition, spectral": lambda m: condition_(m, WeightRule()),
            },
        ),
        "Llama 1.2B on meta": (
            lambda: llama("meta"),
            {"find (table)": find_attention, "survey again": survey_attention},
        ),
    }
    if options.traced_llama:
        jobs["Llama 1.2B"] = (lambda: llama("cpu"), {"find (traced)": find_attention})
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    print(f"{'model':20} {'part':22} {'min s':>7} {'median s':>9} {'memory MiB':>11}")
    for name, (make, parts) in jobs.items():
        model = make()
        before = peak()
        del model
        measured = timed(make, parts, options.rounds)
        above = max(0.0, peak() - before)
        for part, seconds in measured.items():
            print(f"{name:20} {part:22} {min(seconds):7.2f} {statistics.median(seconds):9.2f} {above:11.0f}")
        total = [sum(values) for values in zip(*measured.values(), strict=True)]
        print(f"{name:20} {'together':22} {min(total):7.2f} {statistics.median(total):9.2f}")


if __name__ == "__main__":
    main()
