"""``safepoint show``: a manifest in words."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from safepoint.ambient import SystemAmbient
from safepoint.catalog import Generation
from safepoint.cli.display import (
    JsonOption,
    age_s,
    age_text,
    print_facts,
    print_json,
    print_line,
    print_table,
    print_title,
    size_text,
)
from safepoint.cli.needs import needs_text
from safepoint.cli.source import Source, choose, open_source
from safepoint.contract import needed_words, plain_text
from safepoint.errors import CorruptionError, NotFoundError
from safepoint.format.index import Tensor
from safepoint.format.manifest import Manifest, RankConditions
from safepoint.notes import read_pin, read_verified
from safepoint.restoring.validate import read_indexes

_MOST_RANKS_SHOWN = 8
_ABSENT = "absent"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show")(_show)


def _show(
    source: Annotated[str, typer.Argument(metavar="RUN[@STEP]")],
    with_tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its digests.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds: the newest one, or the one of a step."""
    opened = open_source(source)
    generation = choose(opened)
    manifest = _manifest_of(generation)
    tensors = _read_tensors(opened, manifest) if with_tensors else []
    verified = read_verified(opened.storage, generation.text)
    pin = read_pin(opened.storage, generation.text)
    needs = needed_words(manifest)
    if as_json:
        answer = {
            "url": opened.url,
            "state": generation.state.value,
            "reason": _reason(generation),
            "verified": verified.verified if verified is not None else None,
            "pinned": pin.reason if pin is not None else None,
            "needs": needs,
            "refers_to": manifest.ancestors,
            "manifest": msgspec.to_builtins(manifest),
        }
        if with_tensors:
            answer["tensors"] = [{"rank": rank, **msgspec.to_builtins(tensor)} for rank, tensor in tensors]
        print_json(answer)
        return
    created = f"{manifest.created} ({age_text(age_s(manifest.created, SystemAmbient().now()))} ago)"
    print_facts(
        {
            "step": str(manifest.step),
            "state": generation.state.value + (f": {_reason(generation)}" if _reason(generation) else ""),
            "run": f"{manifest.run} in {opened.url}",
            "generation": manifest.generation,
            "saved": created,
            "verified": verified.verified if verified is not None else "not noted",
            "promise asked": manifest.contract,
        }
        | ({"needs permit": needs_text(needs)} if needs else {})
        | ({"pinned": pin.reason} if pin is not None else {})
        | ({"refers to": ", ".join(manifest.ancestors)} if manifest.ancestors else {})
    )
    _print_manifest(manifest)
    if with_tensors:
        _print_tensors(tensors)


def _manifest_of(generation: Generation) -> Manifest:
    if generation.manifest is not None:
        return generation.manifest
    refusal = generation.refusal
    file, reason = (refusal.file, refusal.reason) if refusal is not None else ("", "")
    if generation.state.value == "damaged":
        raise CorruptionError("the manifest cannot be read", where=f"{generation.text}/{file}", found=reason)
    raise NotFoundError("the save was never completed, so there is nothing to show", where=generation.text)


def _reason(generation: Generation) -> str:
    if generation.refusal is not None:
        return f"{generation.refusal.file}: {generation.refusal.reason}"
    return generation.tombstone.reason if generation.tombstone is not None else ""


def _read_tensors(source: Source, manifest: Manifest) -> list[tuple[int, Tensor]]:
    return [(index.rank, tensor) for index in read_indexes(source.storage, manifest) for tensor in index.tensors]


def _print_manifest(manifest: Manifest) -> None:
    print_facts(_progress(manifest), title="Progress")
    print_title("Lineage")
    for number, link in enumerate(manifest.lineage):
        # The first link of a chain resumed nothing, or a checkpoint of another run.
        verb = "resumed" if number else "started from another run's"
        told = f"{verb} step {link.step} ({link.resumed})" if link.resumed is not None else "started afresh"
        print_line(f"  incarnation {link.incarnation} {told}")
    print_title("Items")
    rows = [
        [name, item.type, item.kind, str(item.tensors), size_text(item.size_bytes), item.digest]
        for name, item in manifest.items.items()
    ]
    print_table(["item", "type", "kind", "tensors", "size", "digest"], rows, numeric=["tensors", "size"])
    conditions = manifest.conditions
    batch = {
        "world size": str(conditions.world_size),
        "global batch": _or_unknown(conditions.global_batch),
        "microbatches per update": _or_unknown(conditions.accumulation),
    }
    print_facts(batch | {f"count of {name}": str(count) for name, count in conditions.counts.items()}, title="Batch")
    sections = {
        "Metrics": {name: plain_text(form) for name, form in manifest.metrics.items()},
        "Configuration": _leaves(conditions.configuration) | _leaves({"config": conditions.config}),
        "Data sets": _leaves(conditions.datasets),
        "Environment": dict(conditions.environment),
        "What lowers the promise": _leaves(msgspec.to_builtins(conditions.reasons)),
        "Seconds": {name: f"{seconds:.3f}" for name, seconds in manifest.timings_s.items()},
    }
    sections |= {_title(one): _otherwise(one) for one in conditions.ranks or ()}
    for title, facts in sections.items():
        if facts:
            print_facts(facts, title=title)
    print_title("Objects")
    objects = [
        [entry.name if entry.generation == manifest.generation else f"{entry.generation}/{entry.name}", entry.digest]
        for entry in manifest.objects
    ]
    sizes = [size_text(entry.size_bytes) for entry in manifest.objects]
    rows = [[name, size, digest] for (name, digest), size in zip(objects, sizes, strict=True)]
    print_table(["object", "size", "digest"], rows, numeric=["size"])


def _title(own: RankConditions) -> str:
    more = len(own.ranks) - _MOST_RANKS_SHOWN
    shown = ", ".join(map(str, own.ranks[:_MOST_RANKS_SHOWN]))
    return f"Otherwise on rank {shown}{f' and {more} more' if more > 0 else ''}"


def _otherwise(own: RankConditions) -> dict[str, str]:
    """Return what some ranks had otherwise than rank 0."""
    facts = {key: text or _ABSENT for key, text in own.environment.items()}
    for named in (own.configuration, own.datasets):
        for name, one in named.items():
            facts |= {name: _ABSENT} if one is None else _leaves({name: one})
    return facts if own.global_batch is msgspec.UNSET else facts | {"global batch": _or_unknown(own.global_batch)}


def _progress(manifest: Manifest) -> dict[str, str]:
    progress = manifest.progress
    counts = {
        "updates": progress.step,
        "of these skipped": progress.skipped,
        "microbatches": progress.microbatches,
        "samples": progress.samples,
        "tokens": progress.tokens,
        "epochs completed": progress.epoch,
    }
    due = {"end of the epoch": "due"} if progress.epoch_end_due else {}
    return {name: str(count) for name, count in counts.items()} | due


def _or_unknown(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _leaves(tree: Any, place: str = "") -> dict[str, str]:
    """Return the leaves of a JSON tree by their paths; a tagged value is a leaf."""
    is_tagged = isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)).startswith("$")
    if isinstance(tree, dict) and not is_tagged:
        found: dict[str, str] = {}
        for key, value in tree.items():
            found |= _leaves(value, f"{place}.{key}" if place else str(key))
        return found
    return {place: plain_text(tree)} if tree is not None else {}


def _print_tensors(tensors: list[tuple[int, Tensor]]) -> None:
    print_title("Tensors")
    rows = []
    for rank, tensor in tensors:
        shape = str(list(tensor.global_shape))
        if tensor.shape != tensor.global_shape:
            shape += f", of it {list(tensor.shape)} at {list(tensor.offset)}"
        size = size_text(sum(chunk.size_bytes for chunk in tensor.chunks))
        digests = " ".join(chunk.digest for chunk in tensor.chunks)
        rows.append([f"{tensor.item}/{tensor.name}", tensor.dtype, shape, size, str(rank), digests])
    print_table(["tensor", "type", "shape", "size", "rank", "digests of its chunks"], rows, numeric=["size", "rank"])
