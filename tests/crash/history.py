"""Any history of a run: starts, saves, deaths, power cuts, failures, damage, zombies, wrong clocks; and an ideal.

What holds after each step: a start resumes a checkpoint that is whole, of one step, of the live lineage and not older
than the newest save that was reported done; the next save succeeds; nothing foreign is touched.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from safepoint.catalog import list_generations, read_lineage
from safepoint.errors import FencedError, OutcomeUnknownError, SafepointError
from safepoint.faults.disk import SimulatedDisk
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.format.names import MANIFEST
from safepoint.joining.holder import find_holder
from safepoint.restoring.select import Wish
from safepoint.retention.retain import retain
from safepoint.saving.context import SaveResult
from safepoint.storage.base import Storage
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.crash.ideal import Entry, Ideal
from tests.crash.job import LAST_TWO, Job, whole_state

LIMIT_BYTES = 1 << 20
DAY_S = 86_400.0
FAILURES = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT, errno.EINTR)
FOREIGN = ("notes.txt", "model.bin", "step-7", "rank-00000-of-00001.pt", "manifest.json.bak", "deleted.txt")
# Every count that a test prints.
COUNTS: Counter[str] = Counter()

numbers = st.integers(0, 90)
gaps = st.integers(1, 3)
seeds = st.integers(0, 1 << 16)


class Meanwhile:
    """Pass every verb on; at one of the calls, something else happens first."""

    def __init__(self, inner: Storage, at: int, act: Callable[[], None]) -> None:
        self._inner = inner
        self._at = at
        self._act = act
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._calls += 1
            if self._calls == self._at:
                self._act()
            return found(*arguments, **options)

        return call


class History(RuleBasedStateMachine):
    """Hold a disk, the process that has the run, those that were fenced, and what ought to be."""

    def __init__(self) -> None:
        super().__init__()
        COUNTS["histories"] += 1
        self.disk = SimulatedDisk()
        self.world = FakeWorld()
        self.ideal = Ideal()
        self.holder: Job | None = None
        self.zombies: list[Job] = []
        self.foreign: dict[str, bytes] = {}
        self.pids = 0
        self.incarnation = 0

    # Starts.

    @rule()
    def start(self) -> None:
        """A second start is refused while a first one lives, and harms nobody."""
        if self.holder is None:
            self._start()
            return
        rival = self._job()
        try:
            rival.start()
        except FencedError:
            COUNTS["refused starts"] += 1
            self._lay_down(rival)
            return
        raise AssertionError("a second start was let in beside one that lives")

    @precondition(lambda self: self.holder is not None)
    @rule()
    def take_over(self) -> None:
        self._take_over()

    @precondition(lambda self: len([entry for entry in self.ideal.line if entry.is_sure]) > 1)
    @rule(choice=seeds)
    def go_back(self, choice: int) -> None:
        """Resume an older step on purpose."""
        held = [entry for entry in self.ideal.line if entry.is_sure and entry.is_held and not entry.is_damaged]
        if held:
            self._leave()
            step = held[choice % len(held)].step
            self._start(Wish(step, branch=True))

    @precondition(lambda self: self.holder is None)
    @rule(number=numbers, seed=seeds, cuts_power=st.booleans())
    def crash_in_a_start(self, number: int, seed: int, cuts_power: bool) -> None:
        self.pids += 1
        job = Job(self._stopping(number, seed), self.world, pid=self.pids, piece_bytes=1 << 20)
        try:
            job.start()
        except SimulatedCrash:
            COUNTS["crashes in a start"] += 1
        self._lay_down(job)
        self._cut_power(seed, happens=cuts_power)

    # Saves.

    @rule(gap=gaps, times=st.integers(1, 3))
    def save(self, gap: int, times: int) -> None:
        if self.holder is None:
            self._start()
        for _ in range(times):
            self._save(gap)

    @precondition(lambda self: self.holder is not None)
    @rule(gap=gaps, number=numbers, seed=seeds, cuts_power=st.booleans())
    def crash_in_a_save(self, gap: int, number: int, seed: int, cuts_power: bool) -> None:
        job = self._holder()
        job.saver._storage = self._stopping(number, seed)
        try:
            self._save(gap)
            return
        except SimulatedCrash:
            COUNTS["crashes in a save"] += 1
        finally:
            job.saver._storage = self.disk
        self._lay_down(job)
        self._cut_power(seed, happens=cuts_power)

    @precondition(lambda self: self.holder is not None)
    @rule(gap=gaps, number=numbers, code=st.sampled_from(FAILURES), is_lost=st.booleans(), lasts=st.booleans())
    def fail_in_a_save(self, gap: int, number: int, code: int, is_lost: bool, lasts: bool) -> None:
        job = self._holder()
        effect = Effect.LOSE_ANSWER if is_lost else Effect.FAIL
        fault = Fault(effect, operation=number, errno=code, lasts=lasts and not is_lost)
        job.saver._storage = FaultyStorage(self.disk, FaultScript((fault,)))
        before = self._committed()
        try:
            self._save(gap)
        except OutcomeUnknownError:
            COUNTS["failing saves"] += 1
        except SafepointError as exc:
            COUNTS["failing saves"] += 1
            assert not isinstance(exc, FencedError), exc
            assert self._committed() == before, "a save that failed left a manifest"
        finally:
            job.saver._storage = self.disk
        self._discover()

    @precondition(lambda self: self.zombies)
    @rule(choice=seeds, gap=gaps)
    def zombie_saves(self, choice: int, gap: int) -> None:
        zombie = self.zombies[choice % len(self.zombies)]
        zombie.train_to(zombie.step + gap)
        before = self._committed()
        try:
            zombie.save()
        except FencedError:
            COUNTS["fenced saves"] += 1
            assert self._committed() == before
            return
        raise AssertionError("a save of a fenced start was reported done")

    @precondition(lambda self: self.holder is not None)
    @rule(gap=gaps, number=numbers, saves=st.integers(0, 2))
    def taken_over_in_a_save(self, gap: int, number: int, saves: int) -> None:
        """The holder stands still in the middle of a save while another start takes over, and goes on after that."""
        old = self._holder()

        def happen() -> None:
            COUNTS["takeovers in a save"] += 1
            old.saver._storage = self.disk
            self._take_over()
            for _ in range(saves):
                self._save(1)

        old.saver._storage = Meanwhile(self.disk, number + 1, happen)
        old.train_to(old.step + gap)
        try:
            result = old.save().wait()
        except FencedError:
            assert old in self.zombies
        else:
            # It stood still in its retention, or there was time for one: a mark may have been on its way.
            self._discover()
            self.ideal.reported(result.generation)
            self.ideal.swept(self._is_there, old.saver._unknown)
        finally:
            old.saver._storage = self.disk

    # What happens between.

    @rule(seed=seeds)
    def power_cut(self, seed: int) -> None:
        self._cut_power(seed, happens=True)

    @precondition(lambda self: self.holder is not None)
    @rule(is_orderly=st.booleans())
    def end(self, is_orderly: bool) -> None:
        if is_orderly:
            self._leave()
        else:
            self._lay_down(self._holder())

    @precondition(lambda self: self.holder is None and self.incarnation)
    @rule()
    def prune(self) -> None:
        """As from the command line, which refuses beside a holder; a zombie may still run."""
        lineage = read_lineage(self.disk)
        ambient = FakeAmbient(self.world, pid=0)
        if lineage.run is None or not lineage.chain or find_holder(self.disk, lineage, ambient) is not None:
            return
        COUNTS["prunes"] += 1
        number = lineage.chain[-1].incarnation
        retain(self.disk, run=lineage.run, incarnation=number, policy=LAST_TWO, ambient=ambient)
        self.ideal.swept(self._is_there)

    @rule(choice=seeds, way=st.sampled_from(["flip", "cut", "remove"]))
    def damage(self, choice: int, way: str) -> None:
        """Damage a file of a checkpoint, as long as another one stays that must be found."""
        sound = [entry for entry in self.ideal.line if entry.is_sure and entry.is_held and not entry.is_damaged]
        if len(sound) < 2:
            return
        entry = sound[choice % len(sound)]
        folder = f"generations/{entry.generation}"
        names = ("rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", MANIFEST)
        if not all(self._has(f"{folder}/{name}") for name in names):
            return
        name = names[choice // len(sound) % len(names)]
        data = self.disk.read(f"{folder}/{name}", limit_bytes=LIMIT_BYTES)
        at = choice % len(data)
        new = {"flip": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], "cut": data[:at], "remove": None}[way]
        self._replace(f"{folder}/{name}", new)
        COUNTS["damaged files"] += 1
        entry.is_damaged, entry.hides_damage = True, way == "flip" and name != MANIFEST

    @rule(choice=seeds, kind=st.sampled_from(["alive", "record", "journal"]), is_gone=st.booleans())
    def damage_what_is_not_needed(self, choice: int, kind: str, is_gone: bool) -> None:
        if not self.incarnation:
            return
        number = 1 + choice % self.incarnation
        paths = {"alive": f"incarnations/{number:06d}.alive", "record": f"incarnations/{number:06d}.json"}
        path = paths.get(kind, f"journal/{number:06d}.jsonl")
        # A holder that lives may not be told from a dead one without its record.
        if self._has(path) and (kind == "journal" or self.holder is None):
            self._replace(path, None if is_gone else b"\0rubbish")
            COUNTS["damaged files"] += 1

    @rule(choice=seeds, name=st.sampled_from(FOREIGN))
    def put_foreign(self, choice: int, name: str) -> None:
        folders = ["", "generations", "incarnations", *(f"generations/{name}" for name in self._folders())]
        folder = folders[choice % len(folders)]
        path = f"{folder}/{name}".lstrip("/")
        if self.disk.root_exists() and (not folder or self._has_folder(folder)) and path not in self.foreign:
            self.foreign[path] = name.encode()
            self.disk.publish(path, name.encode())
            self.disk.sync_folder(folder)

    @rule(days=st.sampled_from([-400, -1, 0, 1, 30]))
    def set_the_clock(self, days: int) -> None:
        self.world.seconds += days * DAY_S

    @invariant()
    def nothing_foreign_was_touched(self) -> None:
        for path, data in self.foreign.items():
            assert self.disk.read(path, limit_bytes=LIMIT_BYTES) == data, path

    def teardown(self) -> None:
        """After all of it, and a power cut, a start goes on, and its save is found by the next one."""
        self._cut_power(0, happens=True)
        self._start()
        self._save(1)
        self._leave()
        self._start()
        self._leave()

    # Steps that rules share.

    def _job(self, **options: Any) -> Job:
        self.pids += 1
        return Job(self.disk, self.world, pid=self.pids, piece_bytes=1 << 20, **options)

    def _holder(self) -> Job:
        assert self.holder is not None
        return self.holder

    def _start(self, wish: Wish | None = None, *, takeover: bool = False) -> None:
        self._discover()
        job = self._job(takeover=takeover)
        report = job.start(wish)
        COUNTS["restores"] += 1
        allowed = self.ideal.allowed if wish is None else {self._of_step(wish.asked)}
        assert report.generation in allowed, f"{report.generation} was resumed, and not one of {allowed}"
        assert job.state() == whole_state(report.step)
        self.ideal.resumed(report.generation)
        self.holder, self.incarnation = job, job.membership.require().claim.incarnation

    def _take_over(self) -> None:
        self.zombies.append(self._holder())
        self._start(takeover=True)

    def _save(self, gap: int) -> None:
        job = self._holder()
        job.train_to(job.step + gap)
        result: SaveResult = job.save().wait()
        COUNTS["saves"] += 1
        assert (result.step, result.durability) == (job.step, "power")
        self._discover()
        self.ideal.reported(result.generation)
        self.ideal.swept(self._is_there, job.saver._unknown)

    def _leave(self) -> None:
        if self.holder is not None:
            self.holder.end()
            self._lay_down(self.holder)

    def _lay_down(self, job: Job) -> None:
        job.die()
        if job is self.holder:
            self.holder = None

    def _cut_power(self, seed: int, *, happens: bool) -> None:
        """Cut the power under every process, and go on with one of the disks that may be found."""
        if happens:
            COUNTS["power cuts"] += 1
            for job in [*self.zombies, *filter(None, [self.holder])]:
                self._lay_down(job)
            self.zombies.clear()
            states = list(self.disk.crash_states(seed, 6))
            self.disk = states[seed % len(states)]
            there = self._committed()
            self.ideal.line = [one for one in self.ideal.line if one.is_sure or one.generation in there]
        self._discover()

    def _discover(self) -> None:
        """Take note of manifests that nobody reported."""
        lineage = read_lineage(self.disk, needs_chain=False)
        newest = lineage.chain[-1].incarnation if lineage.chain else 0
        for generation in sorted(self._committed()):
            if not self.ideal.knows(generation):
                self.ideal.appeared(generation, is_by_newest=int(generation[19:25]) == newest)
        self.incarnation = lineage.newest

    def _of_step(self, step: object) -> str:
        entries: list[Entry] = [entry for entry in self.ideal.line if entry.step == step and not entry.is_damaged]
        return entries[-1].generation

    def _stopping(self, number: int, seed: int) -> FaultyStorage:
        return FaultyStorage(self.disk, FaultScript((Fault(Effect.STOP, operation=number, lasts=True),), seed))

    def _replace(self, path: str, data: bytes | None) -> None:
        self.disk.delete(path)
        if data is not None:
            self.disk.publish(path, data)
        self.disk.sync_folder(path.rpartition("/")[0])

    def _folders(self) -> list[str]:
        return [str(name) for name in list_generations(self.disk)]

    def _committed(self) -> set[str]:
        return {name for name in self._folders() if self._is_there(name)}

    def _is_there(self, generation: str) -> bool:
        return self._has(f"generations/{generation}/{MANIFEST}")

    def _has_folder(self, folder: str) -> bool:
        above, _, name = folder.rpartition("/")
        return any(entry.name == name and entry.is_folder for entry in self.disk.list(above))

    def _has(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return any(entry.name == name for entry in self.disk.list(folder))
