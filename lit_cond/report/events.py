"""TensorBoard event files into a `Run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_cond.extras import optional_imports
from lit_cond.plots import Histogram
from lit_cond.report.records import read_records
from lit_cond.report.run import Run

__all__ = ["EVENT_FILES", "read_events"]

EVENT_FILES = "*tfevents*"
"""Pattern of the names of event files."""

_KEPT_HISTOGRAMS = 64


def read_events(run: Run, files: list[Path]) -> None:
    """Read event files into a run; of equal steps the later file has the last word.

    A file that ends in the middle of a record, because the run is still being written or was killed, is read up to
    there. What can not be read is noted in the run.

    Args:
        run: Gets the values.
        files: The files, the oldest first.

    Raises:
        MissingExtraError: If tensorboard is not installed.
    """
    with optional_imports("reading TensorBoard's logs"):
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    kept: dict[str, dict[int, Any]] = {}
    for file in files:
        done, damaged = 0, 0
        try:
            size = file.stat().st_size
            for done, record in read_records(file, masked_crc32c):  # noqa: B007
                try:
                    event = Event.FromString(record) if record is not None else None
                except DecodeError:
                    event = None
                if event is None:
                    damaged += 1
                    continue
                if event.session_log.status == SessionLog.START:
                    _forget_from(run, event.step)
                for value in event.summary.value:
                    _take(run, kept, event.step, value)
        except OSError as error:
            run.notes.append(f"{file.name} can not be read: {error.strerror or error}")
            continue
        if not done:
            run.notes.append(f"{file.name} holds no event" + (" that can be read" if size else ", it is empty"))
        elif done < size:
            run.notes.append(
                f"{file.name} is read up to a record that is not whole, {size - done:,} of {size:,} bytes before its "
                "end: the run is still being written, was killed, or the file is damaged"
            )
        if damaged:
            run.notes.append(f"{file.name}: {damaged} of its records are damaged and left out")
    for tag, by_step in kept.items():
        run.histograms[tag] = {step: _histogram(by_step[step]) for step in sorted(by_step)}


def _forget_from(run: Run, step: int) -> None:
    """Drop what a writer with `purge_step` declares as void: everything from that step on."""
    for points in run.scalars.values():
        for void in [old for old in points if old >= step]:
            del points[void]


def _take(run: Run, kept: dict[str, dict[int, Any]], step: int, value: Any) -> None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        run.scalars.setdefault(value.tag, {})[step] = value.simple_value
    elif kind == "histo":
        by_step = kept.setdefault(value.tag, {})
        by_step[step] = value.histo
        if len(by_step) > _KEPT_HISTOGRAMS:
            for void in sorted(by_step)[1:-1:2]:
                del by_step[void]
    elif kind == "image":
        run.images[value.tag] = (step, value.image.encoded_image_string)
    elif kind == "tensor":
        _take_tensor(run, step, value)


def _take_tensor(run: Run, step: int, value: Any) -> None:
    plugin = value.metadata.plugin_data.plugin_name
    if plugin == "text" and value.tensor.string_val:
        run.texts[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode(errors="replace")
    elif plugin == "scalars" or (value.tensor.dtype == 1 and not value.tensor.tensor_shape.dim):  # of TensorFlow 2
        from tensorboard.util.tensor_util import make_ndarray

        run.scalars.setdefault(value.tag, {})[step] = float(make_ndarray(value.tensor))


def _histogram(histo: Any) -> Histogram:
    """Return edges and counts; TensorBoard has upper limits, beyond the values too."""
    edges = [histo.min, *histo.bucket_limit]
    return Histogram(tuple(min(max(edge, histo.min), histo.max) for edge in edges), tuple(histo.bucket))
