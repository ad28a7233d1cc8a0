"""Results of the sweep, one JSON object a line."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.conformance_oracle.worker import Entry

__all__ = ["Results", "fingerprints"]

LIBRARIES = ("torch", "timm", "transformers", "torchvision", "detectron2")
STAMP = ("versions", "finder", "judge")


def fingerprints(root: Path) -> dict[str, Any]:
    """Return what a result depends on: versions of libraries, hashes of the finder's and the judge's sources."""
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "finder": _hash((root / "lit_cond" / "surgery").rglob("*.py"), root),
        "judge": _hash((root / "scripts" / "conformance_oracle").rglob("*.py"), root),
    }


def _versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hash(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Results:
    """Records in a file; the last one of a model counts.

    Args:
        path: The file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[tuple[str, str], dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:  # a line that an interrupted sweep left half written
                    continue
                self._records[record["source"], record["name"]] = record

    def has(self, entry: Entry, stamp: dict[str, Any]) -> bool:
        """Return whether a model was judged with the same libraries, finder and judge."""
        record = self._records.get((entry.source, entry.name))
        return record is not None and all(record.get(key) == stamp[key] for key in STAMP)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record to the file."""
        self._records[record["source"], record["name"]] = record
        text = json.dumps(record)
        before = self.path.read_bytes()[-1:] if self.path.exists() else b""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("" if before in (b"", b"\n") else "\n") + text + "\n")

    def latest(self, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        """Return the last records of some models, in their order."""
        keys = [(entry.source, entry.name) for entry in entries]
        return [self._records[key] for key in keys if key in self._records]
