"""The records of an event file, in TensorFlow's TFRecord format."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["read_records"]

_HEADER = struct.Struct("<QI")  # length of the record, checksum of the length
_CHECKED_BYTES = 256


def read_records(file: Path, checksum: Callable[[bytes], int]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the records of a file until its end, or one that is not whole.

    TensorBoard's own reader computes the checksum of every byte in Python, four fifths of its time. Here those of large
    records, which hold histograms and pictures, are not checked: where the checksum of its length is right, so is the
    place of the next record, and a damaged one is noticed when it is parsed. A wrong bit in a small one would be a
    wrong number.

    Args:
        file: The event file.
        checksum: The masked CRC32C of some bytes.

    Yields:
        How many bytes of the file are read so far, and the record; None for one that is damaged.

    Raises:
        OSError: If the file can not be read.
    """
    done = 0
    with file.open("rb") as stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            length, check = _HEADER.unpack(header)
            if checksum(header[:8]) != check:
                return
            record = stream.read(length)
            check_of_record = stream.read(4)
            if len(record) < length or len(check_of_record) < 4:
                return
            done += _HEADER.size + length + 4
            damaged = length <= _CHECKED_BYTES and checksum(record) != struct.unpack("<I", check_of_record)[0]
            yield done, None if damaged else record
