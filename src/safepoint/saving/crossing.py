"""Crossing: bring a state of which some lies on accelerators into its image, beside the training.

1. All that lies there is asked for at the boundary, and comes on streams beside the training's. The boundary is left
   when what must not wait has arrived; which boxes that is, is decided as for host memory.
2. Before the next step only the accelerators wait for the rest, each thread's own stream of work; the host does not.
3. The rest is looked at twice as in host memory. Counts of writes move as soon as a step is asked for, thus they are
   compared before the first step, or when all has arrived if that is sooner; the samples when all has arrived.
4. Digests are taken, and pieces written, of what has arrived only.
5. The image is left when nothing is on its way to it, or from it to be compared.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import numpy

from safepoint.errors import TornSnapshotError
from safepoint.saving.copying import Copying, Habits, Key, key_of, shift_at
from safepoint.saving.form import FileForm
from safepoint.saving.live import SAMPLE_BYTES, Live, Samples
from safepoint.saving.spans import Integers
from safepoint.saving.transfer import address_of
from safepoint.state.far import Comparison, Far, Trip
from safepoint.state.item import Owned, Source

# As in host memory.
_STRETCH_BYTES = 1 << 20
_SMALL_BYTES = 4096


class Crossing:
    """Copy the sources of a data file to their places in its image; to be used like `Copying`.

    Args:
        form: What the file looks like.
        sources: Where its boxes come from, in the order in which the form was given them.
        image: The memory of the whole file.
        owned: As for `Copying`.
        habits: What was seen before.
        turn: A number that differs from save to save; the sample is taken elsewhere each time.
        far: Which sources lie on accelerators.
    """

    def __init__(
        self,
        form: FileForm,
        sources: Sequence[Source],
        image: memoryview,
        *,
        owned: Owned,
        habits: Habits,
        turn: int,
        far: Far,
    ) -> None:
        self._entries, self._spans, self._live = form.entries, form.spans, Live(form, sources)
        self._image, self._base, self._habits, self._carrier = image, address_of(image), habits, far.carrier
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_looked_at = self._has_arrived = self._is_left = False
        self._told: list[Callable[[], object]] = []
        self._unknown: list[int] = []
        self._learned: list[tuple[list[Key], Comparison]] = []
        numbers = form.spans.places_of(far.numbers)
        try:
            self._near = Copying(
                form, sources, image, owned=owned, habits=habits, turn=turn, elsewhere=numbers.tolist()
            )
            self._now, self._later = self._divide(numbers, owned)
            self._samples = Samples(form.spans, self._later, stretch_bytes=_STRETCH_BYTES, shift=shift_at(turn))
            # What is waited for comes first.
            self._first = [self._fetch(self._now), self._take_samples()]
            self._rest = self._fetch(self._later)
        except BaseException:
            # The next save has the image.
            self._carrier.wait()
            raise
        self._start = int(self._spans.begins[self._later[0]]) if len(self._later) else math.inf

    @property
    def is_complete(self) -> bool:
        """Return whether live memory is no longer needed."""
        return self._has_arrived and self._near.is_complete

    @property
    def is_wanted(self) -> bool:
        """Return whether `settle` has something to do, or the image is used."""
        is_used = bool(self._unknown or self._learned) and not self._is_left
        return not self._has_arrived or is_used or self._near.is_wanted

    def when_complete(self, tell: Callable[[], object]) -> None:
        """Call `tell` once the image is complete, from whichever thread sees that; at once if it is."""
        self._near.when_complete(lambda: self._when_arrived(tell))

    def leave_boundary(self) -> None:
        """Return when what must not wait is in the image.

        Raises:
            TornSnapshotError: A tensor was written to since the boundary.
        """
        try:
            self._near.leave_boundary()
            for trip in self._first:
                trip.wait()
            self._live.check(self._now.tolist())
            if not len(self._later):
                self._arrive()
        except BaseException:
            # Nobody follows this copy, and the next save has the image.
            self.leave_image()
            raise

    def advance(self, end: int) -> None:
        """Have the image complete up to here.

        Raises:
            TornSnapshotError: The state changed while it was copied.
        """
        self._near.advance(end)
        if end > self._start and not self._has_arrived:
            self._arrive()
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Let this thread's next step change live memory on the accelerators when that was read, and wait for the rest.

        To be called by each thread before each step, as long as `is_wanted`.
        """
        if not self._has_arrived:
            # Not for nothing: to wait for what is no part of it ends the capture of a graph.
            self._rest.hold_back()
        with self._lock:
            self._look()
        self._near.settle()
        self._learn()

    def end(self) -> None:
        """Copy no more from host memory, and let go of whoever waits for that; what is under way arrives."""
        self._near.end()

    def leave_image(self) -> None:
        """Let go of the image: when this returns, nothing reads it or writes into it any more."""
        self._near.leave_image()
        with self._lock:
            self._is_left = True
        self._carrier.wait()
        learned, self._learned, self._unknown = self._learned, [], []
        for keys, comparison in learned:
            found = zip(keys, comparison.found(), strict=True)
            self._habits.lies_still.update((key, is_same) for key, is_same in found if is_same is not None)

    def _divide(self, numbers: Integers, owned: Owned) -> tuple[Integers, Integers]:
        """Return the boxes that must not wait, and those that are copied behind the training."""
        live, large = self._live, numbers[self._spans.sizes[numbers] > _SMALL_BYTES].tolist()
        found = self._carrier.hold([live.sources[number] for number in large])
        live.held.update((number, one) for number, one in zip(large, found, strict=True) if one is not None)
        held = list(live.held)
        known = self._habits.known([self._entries[number] for number in held], live.held.values(), owned)
        self._unknown = [number for number, is_known in zip(held, known, strict=True) if is_known is None]
        later = numpy.array(held, numpy.int64)[numpy.array(known, numpy.bool_)]
        return numpy.setdiff1d(numbers, later, assume_unique=True), later

    def _fetch(self, numbers: Integers) -> Trip:
        sources = [self._live.sources[number] for number in numbers.tolist()]
        return self._carrier.fetch(sources, self._image, self._spans.begins[numbers].tolist())

    def _take_samples(self) -> Trip:
        samples, sources = self._samples, [self._live.sources[number] for number in self._later.tolist()]
        places = [own.tolist() for own in numpy.split(samples.within, samples.ends[:-1])] if sources else []
        samples.seen = bytearray(len(samples.within) * SAMPLE_BYTES)
        return self._carrier.sample(sources, places, SAMPLE_BYTES, memoryview(samples.seen))

    def _when_arrived(self, tell: Callable[[], object]) -> None:
        with self._lock:
            if not self._has_arrived:
                self._told.append(tell)
                return
        tell()

    def _arrive(self) -> None:
        """Wait for what is copied behind the training, and look at it."""
        self._rest.wait()
        with self._lock:
            self._look()
            try:
                self._samples.check(0, len(self._later), self._base, self._live, self._later)
            except TornSnapshotError as exc:
                self._fail(exc)
            self._has_arrived = True
            self._let_go()
            told, self._told = self._told, []
        for tell in told:
            tell()

    def _look(self) -> None:
        """Find out, once and before the first step, what is known to have been changed; the lock is held."""
        if self._is_looked_at:
            return
        self._is_looked_at = True
        try:
            self._live.check_held(self._later.tolist())
            self._live.check(self._later.tolist())
        except TornSnapshotError as exc:
            self._fail(exc)

    def _fail(self, failure: TornSnapshotError) -> None:
        self._failure = self._failure or failure
        # The next save copies it at the boundary.
        self._habits.lies_still.update((key_of(self._entries[number]), False) for number in self._live.torn)

    def _learn(self) -> None:
        """Have the accelerators compare what was copied at the boundary with what is there before the next step."""
        with self._lock:
            unknown, self._unknown = self._unknown, []
            if not unknown or self._is_left:
                return
            unknown = [number for number in unknown if self._may_lie_still(number)]
            self._carrier.follow()
            sources = [self._live.sources[number] for number in unknown]
            comparison = self._carrier.compare(sources, self._image, self._spans.begins[unknown].tolist())
            self._learned.append(([key_of(self._entries[number]) for number in unknown], comparison))
            self._let_go()
        comparison.hold_back()

    def _let_go(self) -> None:
        """Keep nothing of which nobody asks for any more."""
        if self._has_arrived and not self._unknown:
            self._live.let_go()

    def _may_lie_still(self, number: int) -> bool:
        try:
            self._live.check_held([number])
            self._live.check([number])
        except TornSnapshotError:
            self._habits.lies_still[key_of(self._entries[number])] = False
            return False
        return True


Copier = Copying | Crossing
"""What brings a state into its image."""
