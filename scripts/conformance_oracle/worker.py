"""One model in a process of its own: build it, find its attention, judge what was found."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from lit_cond.errors import LitCondError, NoMatchingTargetError
from lit_cond.surgery import find_attention
from scripts.conformance_oracle.judge import judge_model
from scripts.conformance_oracle.runs import Bench
from scripts.model_zoo import ZooModel

__all__ = ["Entry", "examine", "isolated", "load_source"]

Finder = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo under the source that the sweep lists it by."""

    source: str
    model: ZooModel

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name if self.source != "negatives" else f"{self.model.source}/{self.model.name}"


def load_source(source: str) -> list[Entry]:
    """Return the zoo's models of one source; none where its library is not installed."""
    name = source if source == "negatives" else f"{source}_models"
    try:
        module = importlib.import_module(f"scripts.model_zoo.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("timm", "transformers", "torchvision", "detectron2"):
            raise
        return []
    if not getattr(module, "available", lambda: True)():
        return []
    make = getattr(module, name, None) or module.models
    return [Entry(source, model) for model in make()]


def isolated(entry: Entry, *, seconds: float, gigabytes: float, finder: Finder = find_attention) -> dict[str, Any]:
    """Examine a model in a forked process.

    Args:
        entry: The model.
        seconds: Processor time after which the process is ended; it may wait for a processor ten times as long.
        gigabytes: Memory that it may take.
        finder: What finds the attention, called as `finder(model, sample=samples)`.

    Returns:
        The record of the model; a crash and the end of the time are records too.
    """
    context = multiprocessing.get_context("fork")  # what was imported need not be imported again
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, entry, seconds, gigabytes, finder))
    process.start()
    sender.close()
    record = _record(entry)
    try:
        if receiver.poll(10 * seconds):
            record = receiver.recv()
        else:
            record.update(reason=f"not done after waiting {10 * seconds:g} s", seconds=seconds)
    except EOFError:
        process.join(5)
        code = process.exitcode or 0
        if code == -signal.SIGXCPU:
            record.update(reason=f"not done after {seconds:g} s", seconds=seconds)
        else:
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            record.update(reason=f"the process died: {reason}")
    finally:
        process.kill()
        process.join()
        receiver.close()
    return record


def _work(sender: Connection, entry: Entry, seconds: float, gigabytes: float, finder: Finder) -> None:
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # Processor time, so that a result does not depend on what else the machine does.
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    silence = os.open(os.devnull, os.O_WRONLY)  # libraries talk while they build
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    record = examine(entry, finder, seconds=seconds)
    record["seconds"] = round(time.process_time(), 2)
    record["peak_megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sender.send(record)
    sender.close()


def _record(entry: Entry) -> dict[str, Any]:
    return {
        "source": entry.source,
        "name": entry.name,
        "note": entry.model.note,
        "verdict": "error",
        "reason": "",
        "class": "",
        "sites": 0,
        "cores": 0,
        "deep": 0,
        "findings": {"wrong": [], "partial": [], "note": []},
        "evidence": {},
        "dtype": "",
        "seconds": 0.0,
        "find_seconds": 0.0,
        "peak_megabytes": 0,
    }


def examine(entry: Entry, finder: Finder = find_attention, *, seconds: float = 60.0) -> dict[str, Any]:
    """Build a model, find its attention and judge what was found.

    Args:
        entry: The model.
        finder: Called as `finder(model, sample=samples)`.
        seconds: Processor time for the whole. From two fifths of it on only short checks are done, from four fifths on
            none.
    """
    record = _record(entry)
    try:
        _examine(entry, finder, seconds, record)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        record.update(verdict="error", reason=f"{_text(error)} ({where})")
    return record


def _examine(entry: Entry, finder: Finder, seconds: float, record: dict[str, Any]) -> None:
    began = time.process_time()
    model = entry.model.build().eval()
    record["class"] = type(model).__name__
    try:
        samples = entry.model.samples(model)
        with torch.no_grad():
            for sample in samples:
                sample.run(model)
    except Exception as error:
        record.update(verdict="no input", reason=_text(error))
        return
    started = time.process_time()
    sites: list[Any] = []
    refusal: LitCondError | None = None
    try:
        sites = finder(model, sample=samples)
    except LitCondError as error:
        refusal = error
    record.update(sites=len(sites), find_seconds=round(time.process_time() - started, 3))
    bench = Bench(model, samples)
    record.update(cores=len(bench.base), dtype=str(bench.dtype).removeprefix("torch."))
    nothing = isinstance(refusal, NoMatchingTargetError)
    if entry.source == "negatives":
        found = ", ".join(site.name for site in sites)
        verdict = "wrong" if sites else "right" if nothing else "refused"
        record.update(verdict=verdict, reason=f"found {found}" if sites else "" if nothing else _text(refusal))
        if bench.base:
            record["findings"]["note"].append(f"the judge sees {len(bench.base)} attention cores")
        return
    if refusal is not None:
        seen = f" ({len(bench.base)} attention cores ran)" if nothing else ""
        verdict = "none" if nothing and not bench.base else "refused"
        record.update(verdict=verdict, reason="" if verdict == "none" else _text(refusal) + seen)
        return
    judgement = judge_model(bench, sites, deep_until=began + 0.4 * seconds, until=began + 0.8 * seconds)
    open_points = judgement.of("wrong") or judgement.of("partial")
    more = f" (and {len(open_points) - 1} more)" if len(open_points) > 1 else ""
    record.update(
        verdict=judgement.verdict,
        reason=open_points[0] + more if open_points else "",
        cores=judgement.cores,
        deep=judgement.deep,
        evidence=dict(judgement.evidence),
        findings={level: judgement.of(level) for level in ("wrong", "partial", "note")},
    )


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
