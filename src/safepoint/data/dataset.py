"""Which data set it is: a name, a length, and a fingerprint where there is one.

Two data sets with equal identities are taken for the same one. A fingerprint makes that more than a guess: give one
that changes whenever the samples change, such as a digest of the list of files.
"""

from __future__ import annotations

import operator
from collections.abc import Sized
from dataclasses import dataclass
from typing import Protocol

from safepoint.errors import RequestError

NO_LENGTH_REMEDY = (
    "For a stream of samples register a safepoint.data.Cursor that counts what was consumed, or use a loader with its "
    "own state, such as torchdata's StatefulDataLoader."
)


class MapDataset(Protocol):
    """Give the sample at an index: the same one each time, but for augmentation from the random streams.

    A data set may have ``__getitems__(indices) -> list`` for whole batches; it is used where streams are per batch.
    """

    def __len__(self) -> int:
        """Return the number of samples, which does not change during a run."""

    def __getitem__(self, index: int, /) -> object:
        """Return one sample."""


@dataclass(frozen=True, slots=True)
class DatasetIdentity:
    """Name a data set. `fingerprint` is None where neither the user nor the data set gave one."""

    name: str
    length: int
    fingerprint: str | None = None


def identify(dataset: Sized, *, name: str | None = None, fingerprint: str | None = None) -> DatasetIdentity:
    """Return the identity of a data set.

    Args:
        dataset: Anything with a length.
        name: Defaults to the qualified name of the class.
        fingerprint: Defaults to the text in `dataset.fingerprint` or `dataset._fingerprint` (Hugging Face's data sets).

    Raises:
        RequestError: The data set has no length, so that no order over its samples can be computed.
    """
    try:
        length = operator.index(len(dataset))
    except (TypeError, NotImplementedError) as exc:
        raise RequestError(
            "a data set without a length has no order that can be resumed",
            where=_name_of(dataset),
            expected="a data set with __len__ and __getitem__",
            found=str(exc) or "no __len__",
            remedy=NO_LENGTH_REMEDY,
        ) from exc
    if fingerprint is None:
        found = (getattr(dataset, attribute, None) for attribute in ("fingerprint", "_fingerprint"))
        fingerprint = next((text for text in found if isinstance(text, str)), None)
    return DatasetIdentity(name if name is not None else _name_of(dataset), length, fingerprint)


def _name_of(dataset: object) -> str:
    # Without the module: a class of a script has another one when the script is imported or moved.
    return type(dataset).__qualname__
