"""Whatever files, messages, words and URLs hold, the answer is a value or an error with a type, within bounds.

Each execution has a limit of memory and of time of the processor. Failures that were found stand as examples.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from safepoint.catalog import examine_all, read_lineage
from safepoint.cli import main
from safepoint.errors import Difference, InternalError, SafepointError
from safepoint.format.asked import is_asked_text
from safepoint.format.ballot import Ballot
from safepoint.format.columns import ColumnsReader
from safepoint.format.index import ObjectReference
from safepoint.format.plain import decode_plain, encode_plain
from safepoint.restoring.compare import compare_checkpoints
from safepoint.restoring.verify import verify_generation
from safepoint.retention.policy import keep
from safepoint.retention.retain import plan_retention, retain
from safepoint.saving.layout import Layout
from safepoint.saving.parts import PartMessage, RankPart, Share, decode_part
from safepoint.saving.vote import count
from safepoint.state.item import SavedItem
from safepoint.storage.base import Storage
from safepoint.storage.url import open_source, open_storage, parse_source
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.crash.damage import small_run, storage_of
from tests.crash.hostile import Change, bounded, changed, changes, place_in_chain, with_change
from tests.crash.job import Job, Weights
from tests.crash.test_hostile_files import laid_out

RUN = small_run()
PATHS = sorted(RUN)
COUNTS: Counter[str] = Counter()
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
# What a command may end with: 70 is our own bug.
EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 7, 9}
GENERATION = "step-000000000050-i000002-00000000"

paths = st.sampled_from(PATHS)
data_paths = st.sampled_from([path for path in PATHS if path.startswith("generations/")])


def answered(act: Callable[[], object]) -> bool:
    """Return whether something gave a value; an error without a type is let through."""
    try:
        with bounded():
            act()
    except SafepointError as exc:
        assert not isinstance(exc, InternalError), exc
        assert len(str(exc)) < 20_000, "a message repeats a hostile text at length"
        return False
    return True


def read_in_every_way(storage: Storage) -> None:
    """Look at all of a run, and delete what retention lets go."""
    lineage = read_lineage(storage, needs_chain=False)
    found = examine_all(storage, lineage)
    for generation in found:
        answered(lambda generation=generation: verify_generation(storage, generation))
    whole = [generation for generation in found if generation.manifest is not None]
    if len(whole) > 1:
        answered(lambda: compare_checkpoints(storage, whole[0], storage, whole[1]))
    plan_retention(storage, lineage, keep(last=2))
    retain(storage, run=lineage.run or "", incarnation=2, policy=keep(last=2), ambient=FakeAmbient(FakeWorld(), pid=9))


class Judging(Weights):
    """Weights that look at what they are given before they take it."""

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        specs = [(one.name, one.dtype, one.shape) for one in saved.specs.values()]
        is_known = isinstance(saved.plain, dict) and isinstance(saved.plain.get("step"), int)
        if is_known and specs == [("weight", "uint8", (len(self.data),))]:
            return []
        return [Difference(f"{self.name}.state", "its state", repr(saved.plain)[:40], "weights and a step")]


def start(storage: Storage) -> None:
    job = Job(storage, FakeWorld(states={1: "gone", 2: "gone"}), pid=3)
    job.items.update({name: Judging(name) for name in ("first", "second")})
    try:
        report = job.start()
        COUNTS[f"starts at step {report.step}"] += 1
    finally:
        job.die()


def check_run(files: Mapping[str, bytes]) -> None:
    COUNTS["runs with a value" if answered(lambda: read_in_every_way(storage_of(files))) else "runs refused"] += 1
    COUNTS["starts refused"] += not answered(lambda: start(storage_of(files)))


@given(st.lists(st.tuples(paths, changes), min_size=1, max_size=2))
def changed_files(steps: Sequence[tuple[str, Sequence[Change]]]) -> None:
    files: Mapping[str, bytes] = RUN
    for path, change in sorted(steps, key=lambda step: place_in_chain(step[0])):
        files = with_change(files, path, change) if path in RUN else files
    check_run(files)


@given(paths, st.integers(0, 5000), st.integers(0, 40), st.binary(max_size=24))
def other_bytes(path: str, at: int, length: int, new: bytes) -> None:
    """In place of any bytes of any file, others; where only the seal may notice, it is made right."""
    at %= len(RUN[path]) + 1
    check_run({**RUN, path: RUN[path][:at] + new + RUN[path][at + length :]})


TAGS = ["float", "int", "complex", "str", "bytes", "tuple", "set", "frozenset", "dict", "ordered", "datetime", "date"]
TAGS += ["time", "timedelta", "path", "size", "dtype", "numpy", "tensor", "scalar", "view", "shared", "same", "other"]
TEXTS = ["0x1.8p+0", "0x1.8000000000000p+0", "nan", "-0x1f", "AP8=", "2025-10-26T02:30:00", "2025-03-01", "float32"]
TEXTS += ["<f8", "posix", "tensor", "cpu", "00", "ff" * 8, "\x00", "é", "", "0x" + "f" * 70_000]
tags = st.sampled_from([f"${tag}" for tag in TAGS])
words = st.sampled_from(TEXTS) | st.text(max_size=6)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(words, inner, max_size=3),
        st.builds(lambda tag, value: {tag: value}, tags, inner),
        st.builds(lambda tag, values: {tag: values}, tags, st.lists(inner, max_size=7)),
        st.builds(lambda tag, pairs: {tag: pairs}, tags, st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3)),
    ),
    max_leaves=12,
)


@given(trees)
def plain_values(tree: Any) -> None:
    """What is decoded is what a writer makes of it."""
    found: list[object] = []
    if answered(lambda: found.append(decode_plain(tree, where="x"))):
        COUNTS["plain values decoded"] += 1
        assert encode_plain(found[0]) == tree
    else:
        COUNTS["plain values refused"] += 1


BALLOT = Ballot(
    "run", GENERATION, 2, 0, 2, "0" * 32, (ObjectReference(GENERATION, "rank-00000-of-00002.json", 9, "f" * 32),)
)


@given(st.integers(0, 1), changes, st.binary(max_size=8) | st.none())
def ballots(place: int, steps: Sequence[Change], raw: bytes | None) -> None:
    messages = [msgspec.json.encode(msgspec.structs.replace(BALLOT, rank=rank)) for rank in range(2)]
    hostile = msgspec.json.encode(changed(msgspec.json.decode(messages[place]), steps))
    messages[place] = hostile if raw is None else raw + hostile
    COUNTS["ballots counted" if answered(lambda: count(messages, BALLOT)) else "ballots refused"] += 1


PART = msgspec.to_builtins(PartMessage(((0, 0),), (Share(0, 0, 1),), ()))


@given(changes, st.binary(max_size=60) | st.none())
@example([(0, "replace", 7)], None)
def messages_of_ranks(steps: Sequence[Change], raw: bytes | None) -> None:
    tree = changed([PART, [b"names", b"numbers"]], steps)
    try:
        encoded = [msgspec.msgpack.encode(part) for part in tree][:2]
    except (OverflowError, UnicodeEncodeError):
        return
    for message in [*encoded, *filter(None, [raw])]:
        parts: list[RankPart] = []
        answered(lambda message=message, parts=parts: parts.append(decode_part(message, Layout(()), where="x")))
        assert not any(part.boxes for part in parts), "a part of a layout without boxes"
        answered(lambda message=message: ColumnsReader().decode(message, digest="0" * 32, where="x"))
        COUNTS["messages"] += 1


STEPS = ["", "@50", "@0", "@-1", "@1e3", "@" + "9" * 30, "@", "/@50", "@x", "/../run", "/."]
URLS = [
    "file://",
    "FILE://",
    "file:///",
    "memory://",
    "s3://",
    "gs://b",
    "http://",
    "x+y://",
    "~",
    "file:/",
    "//",
    "%00",
]
URLS += ["file://localhost/", "file:///%2e%2e/", "a?b", "\0", "C:\\run", "run@", "@5", "\udcff", "-", " "]
urls = st.builds("".join, st.lists(st.sampled_from([*URLS, *STEPS]) | st.text(max_size=4), max_size=4))


@given(urls)
@example("file://[")
def storage_urls(url: str) -> None:
    """Nothing is created, whatever a place is called."""
    with in_an_empty_folder() as folder:
        for act in (
            lambda: open_storage(url),
            lambda: parse_source(url, is_asked=is_asked_text),
            lambda: open_source(url, record="run.json", is_asked=is_asked_text),
        ):
            COUNTS["URLS opened" if answered(act) else "URLS refused"] += 1
        assert list(folder.iterdir()) == []


COMMANDS = ["ls", "show", "verify", "diff", "prune", "plan", "no-such"]
OPTIONS = ["--json", "--all", "--no-note", "--dry-run", "--tensors", "--traceback", "--help", "--keep-last", "--best"]
OPTIONS += ["--every", "loss:min", ":", "2", "0", "-1", "1e9", "nan", "--save", "--restore", "--mtbf", "1m", "6h"]
cli_words = st.sampled_from(OPTIONS) | st.text(max_size=5).filter(lambda word: word != "--")


@given(
    st.sampled_from(COMMANDS),
    st.lists(st.sampled_from(STEPS), max_size=2),
    st.lists(cli_words, max_size=4),
    st.tuples(data_paths, changes) | st.none(),
)
def command_lines(
    command: str, steps: Sequence[str], others: Sequence[str], damage: tuple[str, Sequence[Change]] | None
) -> None:
    """Nothing but the run is touched, whatever is typed and whatever the run holds."""
    with in_an_empty_folder() as folder:
        files = RUN if damage is None else with_change(RUN, *damage)
        laid_out(files, folder / "run")
        (folder / "beside").write_bytes(b"untouched")
        typed = [command, *(f"{folder / 'run'}{step}" for step in steps), *others]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(typed)
        assert code in EXIT_CODES, errors.getvalue()
        assert "Traceback" not in errors.getvalue() or "--traceback" in typed
        COUNTS[f"{command} ended with {code}"] += 1
        assert sorted(entry.name for entry in folder.iterdir()) == ["beside", "run"]
        assert (folder / "beside").read_bytes() == b"untouched"


@contextlib.contextmanager
def in_an_empty_folder() -> Any:
    before = os.getcwd()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


# The executions of each, in every run of the tests and in the soak.
TARGETS: dict[str, tuple[Callable[[], None], int, int]] = {
    "changed files": (changed_files, 15, 6_000),
    "other bytes": (other_bytes, 8, 4_000),
    "plain values": (plain_values, 60, 20_000),
    "ballots": (ballots, 60, 20_000),
    "messages of ranks": (messages_of_ranks, 50, 10_000),
    "URLs": (storage_urls, 50, 10_000),
    "command lines": (command_lines, 12, 4_000),
}


def fuzz(name: str, *, is_long: bool) -> None:
    target, sample, full = TARGETS[name]
    COUNTS.clear()
    settings(max_examples=full if is_long else sample, suppress_health_check=SLOW, deadline=None)(target)()
    print("counted:", dict(sorted(COUNTS.items())))


@pytest.mark.parametrize("name", TARGETS)
def test_any_input_is_answered_with_a_value_or_a_typed_error(name: str) -> None:
    """Spec: F2.6, F2.7, C11.4"""
    fuzz(name, is_long=False)


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_any_input_is_answered_with_a_value_or_a_typed_error_for_long(name: str) -> None:
    """Spec: F2.6, F2.7, C11.4"""
    fuzz(name, is_long=True)
