"""The names of everything in a run's folder, and the grammar they obey.

A name is made here, or it is not one of ours: what does not parse is foreign, is never read and never deleted.

Spec: F5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from safepoint.errors import RequestError

RUN_RECORD = "run.json"
INCARNATIONS = "incarnations"
GENERATIONS = "generations"
JOURNAL = "journal"
MANIFEST = "manifest.json"
TOMBSTONE = "deleted.json"
VERIFIED = "verified.json"
PIN = "pinned.json"
TEMPORARY_PREFIX = ".tmp-"

MAX_STEP = 10**12 - 1
MAX_INCARNATION = 10**6 - 1

_GENERATION = re.compile(r"step-([0-9]{12})-i([0-9]{6})-([0-9a-f]{8})")
_INCARNATION_FILE = re.compile(r"([0-9]{6})\.(?:json|resumed\.json|refused\.json|alive)")
_DATA = re.compile(r"rank-([0-9]{5})-of-([0-9]{5})(?:\.part-[0-9]{3})?\.safetensors")
_INDEX = re.compile(r"rank-([0-9]{5})-of-([0-9]{5})\.json")
_ITEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, slots=True, order=True)
class GenerationName:
    """Take a generation's name apart; ordered by step, then incarnation, then nonce.

    The nonce is 8 hexadecimal digits: 2 count the attempts of the incarnation at this step from 00, 6 are random.
    """

    step: int
    incarnation: int
    nonce: str

    def __str__(self) -> str:
        return f"step-{self.step:012d}-i{self.incarnation:06d}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> GenerationName | None:
        """Return the parts of a generation's name, or None for a name that is not one."""
        match = _GENERATION.fullmatch(text)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


def next_nonce(existing: Iterable[GenerationName], *, step: int, incarnation: int, entropy: str) -> str:
    """Return the nonce of an incarnation's next attempt at a step: greater than those of its earlier ones.

    Args:
        existing: The generations that there are.
        entropy: Six hexadecimal digits.

    Spec: F5.2.
    """
    nonces = (name.nonce for name in existing if (name.step, name.incarnation) == (step, incarnation))
    attempt = max((int(nonce[:2], 16) + 1 for nonce in nonces), default=0)
    return f"{min(attempt, 255):02x}{entropy}"


def incarnation_path(number: int, suffix: str = "json") -> str:
    """Return the path of an incarnation's file: its record, or ``resumed.json``, ``refused.json``, ``alive``."""
    return f"{INCARNATIONS}/{number:06d}.{suffix}"


def parse_incarnation_file(name: str) -> int | None:
    """Return the number of the incarnation that a file of any kind belongs to, or None for a foreign name."""
    match = _INCARNATION_FILE.fullmatch(name)
    return int(match[1]) if match else None


def journal_path(number: int) -> str:
    """Return the path of an incarnation's journal."""
    return f"{JOURNAL}/{number:06d}.jsonl"


def generation_path(generation: str, name: str = "") -> str:
    """Return the path of a generation's folder, or of an object in it."""
    return f"{GENERATIONS}/{generation}/{name}" if name else f"{GENERATIONS}/{generation}"


def data_name(rank: int, world_size: int, part: int = 0) -> str:
    """Return the name of a rank's data file; `part` counts further files from 1."""
    suffix = f".part-{part:03d}" if part else ""
    return f"rank-{rank:05d}-of-{world_size:05d}{suffix}.safetensors"


def index_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's index."""
    return f"rank-{rank:05d}-of-{world_size:05d}.json"


def is_object_name(name: str) -> bool:
    """Return whether a name is that of a data file or an index."""
    return is_data_name(name) or _is_rank_name(_INDEX, name)


def is_data_name(name: str) -> bool:
    """Return whether a name is that of a data file."""
    return _is_rank_name(_DATA, name)


def is_item_name(name: object) -> bool:
    """Return whether a name is one that an item may have."""
    return isinstance(name, str) and bool(_ITEM.fullmatch(name)) and name != "__metadata__"


def check_item_name(name: object) -> str:
    """Return an item's name, or raise `RequestError` when it is outside the grammar."""
    if not isinstance(name, str) or not is_item_name(name):
        raise RequestError(
            "an item's name is not allowed",
            where=repr(name),
            expected="1 to 128 of letters, digits, '_', '.' and '-', the first no '.' or '-'; not '__metadata__'",
        )
    return name


def _is_rank_name(pattern: re.Pattern[str], name: str) -> bool:
    match = pattern.fullmatch(name)
    return match is not None and int(match[1]) < int(match[2])
