"""A storage to which a script happens."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from safepoint.errors import OutcomeUnknownError, StorageError
from safepoint.faults.chance import Chance
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.storage.base import Appender, Durability, Entry, ObjectWriter, Storage, byte_view, check_line, check_path
from safepoint.storage.failures import storage_error

_Result = TypeVar("_Result")


class FaultyStorage:
    """Pass every verb on to another storage, and let the faults of a script happen on the way.

    Operations are counted in the order in which they begin. With several threads that order is theirs; a script that
    goes by verb and path does not depend on it.
    """

    def __init__(self, inner: Storage, script: FaultScript | None = None) -> None:
        self._inner = inner
        self._script = script if script is not None else FaultScript()
        self._lock = threading.Lock()
        self._operations: list[tuple[int, str, str]] = []
        self._fired: list[tuple[int, Fault]] = []
        self._spared = [0] * len(self._script.faults)
        self._is_stopped = False

    @property
    def operations(self) -> list[tuple[int, str, str]]:
        """Return a copy of the log: (number, verb, path) of each operation begun."""
        with self._lock:
            return list(self._operations)

    @property
    def fired(self) -> list[tuple[int, Fault]]:
        """Return which faults happened, each with the number of its operation."""
        with self._lock:
            return list(self._fired)

    @property
    def url(self) -> str:
        """Return the inner storage's URL."""
        return self._inner.url

    @property
    def durability(self) -> Durability:
        """Return the inner storage's durability."""
        return self._inner.durability

    def free_bytes(self) -> int | None:
        """Pass on; nothing depends on the answer, and it is no operation."""
        return self._inner.free_bytes()

    def root_exists(self) -> bool:
        """Count, and pass on."""
        return self.run("root_exists", "", self._inner.root_exists)

    def make_root(self) -> None:
        """Count, and pass on."""
        self.run("make_root", "", self._inner.make_root, cut=lambda _: None)

    def make_folder(self, path: str) -> None:
        """Count, and pass on."""
        self.run("make_folder", path, lambda: self._inner.make_folder(path), cut=lambda _: None)

    def sync_folder(self, path: str) -> None:
        """Count, and pass on."""
        self.run("sync_folder", path, lambda: self._inner.sync_folder(path), cut=lambda _: None)

    def create(self, path: str, *, size_bytes: int = 0) -> FaultyWriter:
        """Count, and pass on; the writer counts its operations too."""

        def act() -> ObjectWriter:
            return self._inner.create(path, size_bytes=size_bytes)

        writer = self.run("create", path, act, undo=lambda writer: writer.abandon())
        return FaultyWriter(self, writer, path)

    def publish(self, path: str, data: bytes) -> None:
        """Count, and pass on."""
        self.run_with_bytes("publish", path, lambda some: self._inner.publish(path, some), data, self._litter)

    def put(self, path: str, data: bytes) -> None:
        """Count, and pass on."""
        self.run_with_bytes("put", path, lambda some: self._inner.put(path, some), data, self._litter)

    def append(self, path: str) -> FaultyAppender:
        """Count, and pass on; the appender counts its operations too."""
        appender = self.run("append", path, lambda: self._inner.append(path), undo=lambda appender: appender.close())
        return FaultyAppender(self, appender, path)

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Count, and pass on."""

        def act() -> bytes:
            return self._inner.read(path, limit_bytes=limit_bytes)

        return self.run(
            "read",
            path,
            act,
            cut=lambda chance: chance.prefix(act()),
            flip=lambda chance: chance.flip_bit(act()),
        )

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        """Count, and pass on; what a cut leaves out is zero."""
        view = byte_view(buffer)

        def act() -> None:
            self._inner.read_into(path, offset_bytes, buffer)

        def cut(chance: Chance) -> None:
            act()
            view[:] = chance.prefix(view.tobytes()).ljust(len(view), b"\0")

        def flip(chance: Chance) -> None:
            act()
            view[:] = chance.flip_bit(view.tobytes())

        self.run("read_into", path, act, cut=cut, flip=flip)

    def size(self, path: str) -> int:
        """Count, and pass on."""
        return self.run(
            "size",
            path,
            lambda: self._inner.size(path),
            cut=lambda chance: chance.below(max(1, self._inner.size(path))),
        )

    def list(self, path: str) -> list[Entry]:
        """Count, and pass on."""

        def cut(chance: Chance) -> list[Entry]:
            entries = self._inner.list(path)
            return entries[: chance.below(max(1, len(entries)))]

        return self.run("list", path, lambda: self._inner.list(path), cut=cut)

    def delete(self, path: str) -> None:
        """Count, and pass on."""
        self.run("delete", path, lambda: self._inner.delete(path), cut=lambda _: None)

    def delete_folder(self, path: str) -> None:
        """Count, and pass on."""
        self.run("delete_folder", path, lambda: self._inner.delete_folder(path), cut=lambda _: None)

    def run(
        self,
        verb: str,
        path: str,
        act: Callable[[], _Result],
        *,
        cut: Callable[[Chance], _Result] | None = None,
        flip: Callable[[Chance], _Result] | None = None,
        part: Callable[[Chance, Effect], None] | None = None,
        undo: Callable[[_Result], None] | None = None,
    ) -> _Result:
        """Count one operation, and do what the script makes of it.

        Args:
            verb: The verb's name in the log.
            path: The path concerned.
            act: Does what was asked.
            cut: Does less, and reports success.
            flip: Does it with one bit turned over.
            part: Leaves what a failure or a death within the operation leaves.
            undo: Lets go of a result that the caller will not get.
        """
        check_path(path)
        number, fault = self._begin(verb, path)
        if fault is None:
            return act()
        chance = Chance(self._script.seed, number)
        if fault.effect is Effect.CUT_SHORT and cut is not None:
            return cut(chance)
        if fault.effect is Effect.FLIP_BIT and flip is not None:
            return flip(chance)
        if fault.effect is Effect.LOSE_ANSWER:
            result = act()
            if undo is not None:
                undo(result)
            raise _lost_answer(verb, path)
        if part is not None:
            part(chance, fault.effect)
        if fault.effect is Effect.STOP:
            raise SimulatedCrash(f"stopped at operation {number}: {verb} {path}")
        raise storage_error(fault.errno, doing=verb, where=path)

    def run_with_bytes(
        self,
        verb: str,
        path: str,
        act: Callable[[bytes], None],
        data: bytes,
        part: Callable[[Chance, Effect, str, bytes], None] | None = None,
    ) -> None:
        """Do as `run` for a verb that takes bytes and returns nothing."""
        self.run(
            verb,
            path,
            lambda: act(data),
            cut=lambda chance: act(chance.prefix(data)),
            flip=lambda chance: act(chance.flip_bit(data)),
            part=None if part is None else lambda chance, effect: part(chance, effect, path, data),
        )

    def _begin(self, verb: str, path: str) -> tuple[int, Fault | None]:
        with self._lock:
            if self._is_stopped:
                raise SimulatedCrash(f"stopped before: {verb} {path}")
            number = len(self._operations)
            self._operations.append((number, verb, path))
            fault = self._pick(number, verb, path)
            if fault is not None:
                self._fired.append((number, fault))
                self._is_stopped = fault.effect is Effect.STOP
            return number, fault

    def _pick(self, number: int, verb: str, path: str) -> Fault | None:
        chosen: Fault | None = None
        for index, fault in enumerate(self._script.faults):
            if not fault.meets(number, verb, path):
                continue
            met_before = self._spared[index]
            self._spared[index] += 1
            is_due = met_before == fault.occurrence or (fault.lasts and met_before > fault.occurrence)
            if is_due and chosen is None:
                chosen = fault
        return chosen

    def _litter(self, chance: Chance, effect: Effect, path: str, data: bytes) -> None:
        """Leave the temporary object of a publisher that died before it gave the name, or none."""
        if effect is not Effect.STOP or chance.below(2) == 0:
            return
        folder = path.rpartition("/")[0]
        name = f".tmp-{chance.below(1 << 64):016x}"
        with contextlib.suppress(StorageError):
            writer = self._inner.create(f"{folder}/{name}" if folder else name)
            writer.write(memoryview(chance.prefix(data)))
            writer.abandon()


class FaultyWriter:
    """Count the operations of a writer."""

    def __init__(self, storage: FaultyStorage, inner: ObjectWriter, path: str) -> None:
        self._storage = storage
        self._inner = inner
        self._path = path
        self._is_failed = False

    def write(self, data: memoryview) -> None:
        """Count, and pass on; a failure stores a part and is final."""
        self._require_sound("write")
        with self._failing():
            self._storage.run_with_bytes("write", self._path, self._pass, byte_view(data).tobytes(), self._store_part)

    def finish(self) -> None:
        """Count, and pass on; a cut reports a sync that was not done."""
        self._require_sound("finish")
        with self._failing():
            self._storage.run("finish", self._path, self._inner.finish, cut=lambda _: self._inner.abandon())

    def abandon(self) -> None:
        """Pass on without counting: it changes nothing that lasts."""
        self._inner.abandon()

    def _pass(self, data: bytes) -> None:
        self._inner.write(memoryview(data))

    def _store_part(self, chance: Chance, effect: Effect, path: str, data: bytes) -> None:
        self._pass(chance.prefix(data))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            self._is_failed = True
            self._inner.abandon()
            raise

    def _require_sound(self, doing: str) -> None:
        if self._is_failed:
            raise storage_error(errno.EIO, doing=f"{doing} after an earlier failure", where=self._path)


class FaultyAppender:
    """Count the operations of an appender."""

    def __init__(self, storage: FaultyStorage, inner: Appender, path: str) -> None:
        self._storage = storage
        self._inner = inner
        self._path = path

    def append(self, line: bytes) -> None:
        """Count, and pass on."""
        check_line(line)

        def act(some: bytes) -> None:
            self._inner.append(_one_line(some))

        self._storage.run_with_bytes("append_line", self._path, act, line)

    def replace_last(self, line: bytes) -> None:
        """Count, and pass on."""
        check_line(line)
        self._storage.run_with_bytes(
            "replace_line", self._path, lambda some: self._inner.replace_last(_one_line(some)), line
        )

    def close(self) -> None:
        """Pass on without counting."""
        self._inner.close()


def _one_line(line: bytes) -> bytes:
    # A flipped bit may have made a newline, which no appender takes.
    return line.replace(b"\n", b"\0")


def _lost_answer(verb: str, path: str) -> StorageError | OutcomeUnknownError:
    if verb == "publish":
        return OutcomeUnknownError(
            "an object was given its name, and the answer was lost",
            where=path,
            remedy="Look whether it is there, and whether it is ours, before trying again.",
        )
    return storage_error(errno.ETIMEDOUT, doing=verb, where=path)
