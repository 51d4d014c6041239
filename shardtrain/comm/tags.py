"""All tags that messages on a model's group have, in one table: messages of equal tags are of one kind.

A message meets one of the same tag from the same rank, the first sent the first received::

    from        to          what
    0           2**20 - 1   nothing of ours: users' own messages on the same group
    2**20       2**26 - 1   movements of the engine: 2**20 numbers at each of 63 positions, round and round
    2**26       2**27 - 1   ranks meeting before one of the backend's own collectives
    2**27       2**28 - 1   reports, two tags for each transport: a report, and the pulse beside it
    2**28                   the row in which a rank tells what public collective it means
    2**28 + 1               its text, where the ranks do not mean the same
    2**29       2**30 - 1   payloads of public collectives, by their sizes

A movement's number says which unit and which of its two movements, and leaves room for its segments. After
4,096 units numbers come again, which does no harm: two gathers and a reduction are under way at most.
"""

from __future__ import annotations

import zlib

_NUMBERS = 1 << 20
_MEETINGS = 1 << 26
_POSITIONS = _MEETINGS // _NUMBERS - 1
_REPORTS = 1 << 27
ROW = 1 << 28
TEXT = ROW + 1
_SIZES = 1 << 29
_PRIME = _SIZES - 3

_SEGMENTS = 128


def unit_number(unit: int, movement: int) -> int:
    """The number of a unit's gather (0) or reduction (1)."""
    return (2 * unit + movement) * _SEGMENTS


def segment_number(number: int, segment: int) -> int:
    """The number of one segment's part of the movement ``number``."""
    assert segment < _SEGMENTS, f"a unit has at most {_SEGMENTS} segments"
    return number + segment


def movement_tag(position: int, number: int) -> int:
    """The movement ``number`` that a rank makes at ``position``; ranks on different paths do not meet."""
    return (1 + position % _POSITIONS) * _NUMBERS + number % _NUMBERS


def meeting_tag(position: int, kind: str, number: int) -> int:
    """Ranks that make ``kind`` of movement ``number`` at ``position``, and mean the backend's own."""
    return _MEETINGS + zlib.crc32(f"{position} {kind} {number}".encode()) % (_REPORTS - _MEETINGS)


def report_tag(number: int) -> int:
    """Reports of the transport ``number``, below 2**24; the next tag is its pulse's."""
    assert 0 <= number < 1 << 24
    return _REPORTS + 2 * number


def size_tag(size: int) -> int:
    """A payload of so many bytes: messages of different sizes never meet, whatever their ranks believe."""
    return _SIZES + size % _PRIME
