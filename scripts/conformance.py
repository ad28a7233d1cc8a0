"""Sweep over the model zoo: is the attention that the finder reports what the models compute?

For each model the finder gets the model and one small input of each kind. A judge that shares no code with it then adds
random numbers to exactly the rows of each reported view, one at a time, and looks at the operands of the attention
kernels: the operand of this role has to change, by the image of X * delta, and no other; rows that are not listed must
not change it; every attention that ran must be accounted for (see `scripts/conformance_oracle`).

Every model runs in a process of its own; one that crashes or takes too long is recorded and the sweep goes on. Results
are appended to a file of JSON lines. A model that is already there with the same libraries, finder and judge is
skipped.

Verdicts: `right`; `partial`: right as far as the sites go, with open points that a person should look at; `refused`:
the finder raised an error of lit_cond, its text is kept; `wrong`: the finder says something that is not so; `none`:
nothing found, and no attention ran; `no input`: no sample, or the model does not run on it; `error`: anything else.
For models without attention (source `negatives`) `right` means that nothing was found.

Example:
    python scripts/conformance.py --out conformance.jsonl --source timm --only 'vit_.*' --report docs/conformance.md
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the zoo and the judge stand beside this script
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; one model is one core's work
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from scripts.conformance_oracle.report import counts_table, markdown, to_look_at  # noqa: E402
from scripts.conformance_oracle.results import Results, fingerprints  # noqa: E402
from scripts.conformance_oracle.worker import isolated, load_source  # noqa: E402

SOURCES = ("timm", "transformers", "torchvision", "detectron2", "negatives")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; return 1 if anything is wrong, else 0."""
    options = _parser().parse_args(arguments)
    entries = [entry for source in options.source for entry in load_source(source)]
    pattern = re.compile(options.only)
    entries = [entry for entry in entries if pattern.fullmatch(entry.name)]
    if not entries:
        print(f"no model of {', '.join(options.source)} has a name that matches {options.only!r} in full", flush=True)
        return 2
    results = Results(options.out)
    stamp = fingerprints(ROOT)
    for number, entry in enumerate(entries, 1):
        if not options.again and results.has(entry, stamp):
            continue
        record = isolated(entry, seconds=options.timeout, gigabytes=options.memory)
        results.add({**record, **stamp})
        print(f"{number}/{len(entries)} {_line(record)}", flush=True)
    chosen = results.latest(entries)
    print(f"\n{counts_table(chosen)}\n{to_look_at(chosen)}", flush=True)
    if options.report is not None:
        options.report.write_text(markdown(chosen), encoding="utf-8")
    return int(any(record["verdict"] == "wrong" for record in chosen))


def _line(record: dict[str, object]) -> str:
    reason = f"  {record['reason']}" if record["reason"] else ""
    return f"{record['source']:12} {record['name']:40} {record['verdict']:9} {record['seconds']:6.1f} s{reason}"


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines that results are appended to")
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=list(SOURCES), help="which part of the zoo")
    parser.add_argument("--only", default=".*", help="regular expression that the model's name matches in full")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of processor time for one model")
    parser.add_argument("--memory", type=float, default=12.0, help="gigabytes for one model")
    parser.add_argument("--again", action="store_true", help="also models that have a result already")
    parser.add_argument("--report", type=Path, help="write a report in Markdown here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
