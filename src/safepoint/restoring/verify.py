"""Verify: read every byte that a manifest names, and compare it with its digest.

1. Nothing is changed, and nothing of a tensor is kept: memory is bounded by the largest index, the largest header and
   the buffers of the threads that read.
2. Damage is a finding, and reading goes on: one look tells all that is wrong. A storage that does not answer raises.
3. A chunk that lies in an ancestor's file is read there.
4. What the manifest names is read past the system's cache; see `safepoint.restoring.reread`.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace

from safepoint.ambient import Ambient
from safepoint.catalog import Generation
from safepoint.errors import CorruptionError, ObjectExistsError, ObjectMissingError
from safepoint.format.encoding import MANIFEST_LIMIT_BYTES, check_seal, seal
from safepoint.format.index import Index, ObjectReference
from safepoint.format.manifest import Manifest
from safepoint.format.names import GENERATIONS, MANIFEST, VERIFIED, generation_path, index_name, is_data_name
from safepoint.format.plain import decode_plain
from safepoint.format.records import VerifiedRecord
from safepoint.format.version import FORMAT_VERSION
from safepoint.joining.claim import utc_text
from safepoint.notes import read_verified
from safepoint.restoring.boxes import boxes_by_tensor, check_boxes
from safepoint.restoring.digests import other_digests
from safepoint.restoring.header import check_header
from safepoint.restoring.reread import Part, reread
from safepoint.restoring.validate import HEADER_LIMIT_BYTES, check_items_of, read_index, references_of
from safepoint.storage.base import Storage

_NONCE_BYTES = 8

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Name one thing that does not hold: in which file, of which tensor and rows (half-open), expected, found.

    A file of an ancestor is named with the ancestor's folder.
    """

    file: str
    what: str
    expected: str = ""
    found: str = ""
    tensor: str = ""
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        text = f"{self.file}: {self.what}"
        if self.tensor:
            text += f" [{self.tensor}" + (f", rows {self.rows[0]} to {self.rows[1]}]" if self.rows else "]")
        if self.expected:
            text += f"; expected {self.expected}"
        return text + (f"; found {self.found}" if self.found else "")


@dataclass(frozen=True, slots=True)
class Verification:
    """Say what was read of a generation, and what of it does not hold."""

    generation: str
    findings: tuple[Finding, ...]
    bytes_read: int
    objects: int

    @property
    def holds(self) -> bool:
        """Return whether nothing was found."""
        return not self.findings


def verify_generation(storage: Storage, generation: Generation, *, on_progress: Progress | None = None) -> Verification:
    """Read and check every byte that a generation's manifest names.

    Args:
        storage: Where the run lies.
        generation: What `examine` found; without a readable manifest its refusal is the only finding.
        on_progress: Called with (bytes read, bytes in all) after each piece.

    Raises:
        StorageError: The storage does not answer; nothing is concluded from that.

    Spec: C11.
    """
    manifest = generation.manifest
    if manifest is None:
        refusal = generation.refusal
        file, reason = (refusal.file, refusal.reason) if refusal is not None else (MANIFEST, "there is no manifest")
        return Verification(generation.text, (Finding(file, reason),), 0, 0)
    findings: list[Finding] = []
    indexes = list(_read_indexes(storage, manifest, findings))
    findings += _check_ranks(manifest, indexes)
    sizes = _check_sizes(storage, manifest, findings)
    parts = {part for index in indexes for part in _parts_of(manifest, index)}
    findings += _check_every_file_is_described(manifest, parts)
    ordered = sorted(parts, key=lambda part: (part.path, part.offset_bytes))
    findings += [
        _finding(part, "bytes lie behind the end of the file", generation.text)
        for part in ordered
        if part.path in sizes and part.end_bytes > sizes[part.path]
    ]
    # The index of a rank that could not be decoded was read for that, and has no part.
    done = sum(entry.size_bytes for entry in manifest.objects if not is_data_name(entry.name)) - sum(
        part.size_bytes for part in parts if not is_data_name(part.path.rsplit("/", 1)[1])
    )
    total = done + sum(part.size_bytes for part in parts)
    for size_bytes, differing in reread(
        storage, [part for part in ordered if part.end_bytes <= sizes.get(part.path, 0)]
    ):
        findings += [
            replace(_finding(part, part.what, generation.text), expected=part.digest, found=found)
            for part, found in differing
        ]
        done += size_bytes
        if on_progress is not None:
            on_progress(done, total)
    findings += _check_headers(storage, indexes, findings)
    return Verification(generation.text, tuple(findings), done, len(manifest.objects))


def note_verified(storage: Storage, verification: Verification, *, run: str, ambient: Ambient) -> bool:
    """Note beside a manifest that every byte was read back, and return whether the note stands.

    A note that speaks of another manifest is replaced. Nothing is noted of what does not hold.

    Raises:
        StorageError: The note could not be written.

    Spec: F6.
    """
    if not verification.holds:
        return False
    generation = verification.generation
    if read_verified(storage, generation) is not None:
        return True
    manifest = generation_path(generation, MANIFEST)
    record = VerifiedRecord(
        format=FORMAT_VERSION,
        run=run,
        generation=generation,
        manifest=check_seal(storage.read(manifest, limit_bytes=MANIFEST_LIMIT_BYTES), where=manifest),
        verified=utc_text(ambient.now()),
        nonce=ambient.token(_NONCE_BYTES),
    )
    path = generation_path(generation, VERIFIED)
    try:
        storage.publish(path, seal(record))
    except ObjectExistsError:
        storage.delete(path)
        storage.publish(path, seal(record))
    storage.sync_folder(generation_path(generation))
    return True


def _read_indexes(storage: Storage, manifest: Manifest, findings: list[Finding]) -> Iterator[Index]:
    """Yield the indexes that can be read. The manifest's own list bounds the work, not the world size it states."""
    names = sorted(entry.name for entry in manifest.objects if entry.generation == manifest.generation)
    references = references_of(manifest)
    for name in (name for name in names if not is_data_name(name)):
        rank = int(name.split("-")[1])
        try:
            index = read_index(storage, manifest, references, rank=rank)
            for item, held in index.items.items():
                decode_plain(held.plain, where=f"{name}: {item}")
        except ObjectMissingError:
            continue
        except CorruptionError as exc:
            findings.append(_finding_of(exc, name))
            continue
        yield index


def _check_ranks(manifest: Manifest, indexes: list[Index]) -> Iterator[Finding]:
    """Yield what does not hold of all ranks together: each rank once, each tensor whole, each item by digest."""
    own = sum(1 for e in manifest.objects if e.generation == manifest.generation and not is_data_name(e.name))
    if own != manifest.world_size:
        yield Finding(MANIFEST, "not every rank has an index", str(manifest.world_size), str(own))
    if len(indexes) != manifest.world_size:
        return
    try:
        boxes = boxes_by_tensor(manifest, indexes)
    except CorruptionError as exc:
        yield replace(_finding_of(exc, MANIFEST), file=MANIFEST)
        return
    for key, parts in boxes.items():
        try:
            check_boxes(parts, where=str(key))
        except CorruptionError as exc:
            yield replace(_finding_of(exc, MANIFEST), file=MANIFEST, tensor=str(key))
    listed = {item for index in indexes for item in index.items}
    if listed != manifest.items.keys():
        yield Finding(
            MANIFEST, "manifest and indexes name other items", str(sorted(manifest.items)), str(sorted(listed))
        )
    else:
        for index in indexes:
            try:
                check_items_of(manifest, index)
            except CorruptionError as exc:
                yield _finding_of(exc, index_name(index.rank, index.world_size))
        for name, digest in other_digests(manifest, indexes):
            what = f"item {name!r} has another digest in the index"
            yield Finding(MANIFEST, what, manifest.items[name].digest, digest)


def _check_sizes(storage: Storage, manifest: Manifest, findings: list[Finding]) -> dict[str, int]:
    """Return the size of each file that is there, by its path."""
    sizes: dict[str, int] = {}
    for entry in manifest.objects:
        path = generation_path(entry.generation, entry.name)
        file = _file_of(manifest.generation, entry)
        try:
            sizes[path] = storage.size(path)
        except ObjectMissingError:
            findings.append(Finding(file, "the file is missing"))
            continue
        except CorruptionError as exc:
            findings.append(replace(_finding_of(exc, file), file=file))
            continue
        if sizes[path] != entry.size_bytes:
            what = "the file has the wrong size"
            findings.append(Finding(file, what, f"{entry.size_bytes} bytes", f"{sizes[path]} bytes"))
    return sizes


def _parts_of(manifest: Manifest, index: Index) -> Iterator[Part]:
    for entry in manifest.objects:
        if (entry.generation, entry.name) == (index.generation, index_name(index.rank, index.world_size)):
            path = generation_path(entry.generation, entry.name)
            yield Part(path, 0, entry.size_bytes, entry.digest, "the index is damaged")
    paths = [generation_path(entry.generation, entry.name) for entry in index.objects]
    for path, entry in zip(paths, index.objects, strict=True):
        if entry.generation == index.generation:
            yield Part(path, 0, index.header_bytes, index.header_digest, "the header of the file is damaged")
    for tensor in index.tensors:
        what, label = "stored bytes of a tensor are damaged", f"{tensor.item}/{tensor.name}"
        for chunk in tensor.chunks:
            path, size_bytes = paths[chunk.object], chunk.size_bytes
            yield Part(path, chunk.offset_bytes, size_bytes, chunk.digest, what, label, chunk.rows)


def _check_every_file_is_described(manifest: Manifest, parts: Set[Part]) -> Iterator[Finding]:
    described = {part.path for part in parts}
    for entry in manifest.objects:
        if is_data_name(entry.name) and generation_path(entry.generation, entry.name) not in described:
            what = "its bytes cannot be checked: no index that could be read describes them"
            yield Finding(_file_of(manifest.generation, entry), what)


def _check_headers(storage: Storage, indexes: list[Index], findings: list[Finding]) -> Iterator[Finding]:
    """Yield where a data file's own header, as any safetensors reader sees it, contradicts the index."""
    faulty = {finding.file for finding in findings}
    for index in indexes:
        for number, entry in enumerate(index.objects):
            if entry.generation != index.generation or entry.name in faulty:
                continue
            if not 8 <= index.header_bytes <= HEADER_LIMIT_BYTES:
                yield Finding(
                    entry.name,
                    "the header has no allowed length",
                    f"8 to {HEADER_LIMIT_BYTES}",
                    str(index.header_bytes),
                )
                continue
            header = bytearray(index.header_bytes)
            storage.read_into(generation_path(entry.generation, entry.name), 0, memoryview(header))
            try:
                check_header(bytes(header), index, number, where=entry.name)
            except CorruptionError as exc:
                yield _finding_of(exc, entry.name)


def _finding(part: Part, what: str, generation: str) -> Finding:
    file = part.path.removeprefix(f"{GENERATIONS}/").removeprefix(f"{generation}/")
    return Finding(file, what, tensor=part.tensor, rows=part.rows)


def _finding_of(error: CorruptionError, file: str) -> Finding:
    """Return a finding that says what an error says. Its place is told only where it says more than the file's name."""
    expected = "" if error.expected is None else str(error.expected)
    found = "" if error.found is None else str(error.found)
    place = error.where.rsplit(f"{file}: ", 1)[1] if f"{file}: " in error.where else ""
    return Finding(file, error.message, expected, found, tensor=place)


def _file_of(generation: str, entry: ObjectReference) -> str:
    return entry.name if entry.generation == generation else f"{entry.generation}/{entry.name}"
