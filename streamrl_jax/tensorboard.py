"""Event files that TensorBoard reads: scalars only, written here, since the packages that do it import torch.

A file is a row of records (length, its checksum, an `Event` protocol buffer, its checksum); the layout is
that of TensorFlow's `record_writer.h` and `event.proto`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5

# Fields of Event, Summary, Summary.Value and SessionLog.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
_SUMMARY_VALUE: Final = 1
_TAG, _SIMPLE_VALUE = 1, 2
_STATUS, _STATUS_START = 1, 1


class EventFile:
    """Appends scalars to a new event file.

    Args:
        folder: Where the file goes; made if it is not there.
        purge_step: Points of earlier files from this step on are taken back (a resume); None: none are.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._stream = (folder / name).open("wb")
        self._write(_event(now, _field(_FILE_VERSION, _BYTES, b"brain.Event:2")))
        if purge_step is not None:
            start = _field(_SESSION_LOG, _BYTES, _field(_STATUS, _VARINT, _varint(_STATUS_START)))
            self._write(_event(now, start, purge_step))

    def add(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Writes and flushes one point for each scalar.

        Args:
            step: The horizontal axis.
            wall_time: Seconds since the epoch.
            scalars: Tag -> value, kept in float32.
        """
        values = b"".join(
            _field(
                _SUMMARY_VALUE,
                _BYTES,
                _field(_TAG, _BYTES, tag.encode())
                + _field(_SIMPLE_VALUE, _FIXED32, struct.pack("<f", value)),
            )
            for tag, value in scalars.items()
        )
        self._write(_event(wall_time, _field(_SUMMARY, _BYTES, values), step))
        self._stream.flush()

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._stream.write(length + _checksum(length) + event + _checksum(event))


def _event(wall_time: float, content: bytes, step: int = 0) -> bytes:
    time_field = _field(_WALL_TIME, _FIXED64, struct.pack("<d", wall_time))
    return time_field + _field(_STEP, _VARINT, _varint(step)) + content


def _field(number: int, wire_type: int, content: bytes) -> bytes:
    length = _varint(len(content)) if wire_type == _BYTES else b""
    return _varint(number << 3 | wire_type) + length + content


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset so that a checksum of data that holds checksums stays sound."""
    crc = 0xFFFFFFFF
    table = _crc_table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> tuple[int, ...]:
    def entry(byte: int) -> int:
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        return byte

    return tuple(entry(byte) for byte in range(256))
