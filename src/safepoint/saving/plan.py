"""Plan: all ranks stand at one boundary, and each learns what it writes.

1. Every rank captures first, then the leader says at which step it is, then each rank makes its offer: its step, the
   digest of its layout, and digests of what each item is. The leader answers with the plan.
2. An error of any rank, in its capture as well, is raised on all.
3. Layouts are sent in full only where the leader does not know their digest, parts only where a rank has not the part
   of this division yet. Both are kept from save to save.
4. A rank that missed attempts passes over them: their words stay until every rank has made a later offer. At each
   attempt the leader says again, where the earlier ones since the last offer of all would have been heard, which it is.

Live memory stands still meanwhile. Nothing is copied and nothing written before the plan is made.

Spec: C2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from safepoint.errors import AbortedError, InternalError, LeaderLostError, SafepointError
from safepoint.format.columns import Columns, ColumnsReader, encode_columns
from safepoint.format.digest import digest_bytes
from safepoint.group.agreement import join, lead
from safepoint.group.base import Group
from safepoint.saving.alike import Said, check_alike, check_steps, check_types, find_totals, said_by, settled
from safepoint.saving.capture import Snapshot
from safepoint.saving.divide import Division, divide, divide_alone
from safepoint.saving.kinds import find_kind
from safepoint.saving.layout import Layout, Layouts, divided_items
from safepoint.saving.own_conditions import digest_of, own_of
from safepoint.saving.parts import RankPart, decode_part
from safepoint.state.item import CapturedTensor
from safepoint.state.snapshot import SnapshotItem, digest_state

# Of these every rank holds a part or a replica; of all others the ranks' states are compared as a whole.
_DIVIDED = frozenset({"module", "optimizer"})

UNKNOWN = "unknown"

_MOST_UNHEARD = 16

_log = logging.getLogger(__name__)

_Record = TypeVar("_Record", bound=msgspec.Struct)


class PlannedItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Say of one item its type, its kind, and which rank stores the plain tree; None: each that has it its own.

    `ranks` lists the ranks that have it; None for all. `divisions` are those of these ranks, each once.
    """

    type: str
    kind: str
    keeper: int | None
    ranks: tuple[int, ...] | None = None
    divisions: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tell all ranks what is saved.

    `division` is the digest of how it is divided, `compares` whether replicas are compared; `previous` and `outcome`
    tell how the save before ended, as far as the leader knows; `totals` are samples and tokens over all ranks.
    """

    generation: str
    step: int
    division: str
    items: dict[str, PlannedItem]
    compares: bool
    previous: str = ""
    outcome: str = ""
    totals: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """Hold what a rank knows when the plan is made; `division` on the leader only. The tensors are live memory."""

    snapshot: Snapshot
    plan: Plan
    layout: Layout
    tensors: tuple[CapturedTensor, ...]
    part: RankPart
    division: Division | None


class _ItemOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tell what a rank holds of an item: digests of its tree and, unless it is divided (empty), of all its state.

    `kind` is the one that this rank declares, if it does.
    """

    type: str
    tree: str
    state: str
    division: str = ""
    kind: str = ""


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    layout: str
    division: str
    items: dict[str, _ItemOffer]
    said: Said


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer the offers: by the plan, or by the ranks whose layouts have to be sent first."""

    plan: Plan | None
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Taken:
    snapshot: Snapshot
    layout: Layout
    columns: Columns
    tensors: tuple[CapturedTensor, ...]
    offers: dict[str, _ItemOffer]


class Planner:
    """Make the plans of one manager's saves, and keep what they share.

    Args:
        group: The ranks.
        deadline_s: The longest wait for other ranks, at each exchange.
        compares_every: Replicas are compared at every so manieth save; 0 for never.
        refuses_difference: Whether replicas that differ abort a save that compares them.
    """

    def __init__(
        self, group: Group, *, deadline_s: float, compares_every: int, refuses_difference: bool = True
    ) -> None:
        self._group = group
        self._deadline_s = deadline_s
        self._compares_every = compares_every
        self._refuses_difference = refuses_difference
        self._incarnation, self._attempt = 0, 0
        self._unheard: list[str] = []
        self._count = 0
        self._layouts: dict[str, Columns] = {}
        self._own_layouts = Layouts()
        self._divided = ("", RankPart())
        self._division: Division | None = None
        self._made = ""
        self._alone_with: Layout | None = None
        self._last = ("", "")
        self._topics: list[str] = []
        self._past: list[str] = []

    def use_up(self, topic: str) -> None:
        """Note a topic that nobody reads any more once all ranks have made the next offer."""
        self._topics.append(topic)

    def settle(self) -> None:
        """Forget what was said before the last offers of all; each topic takes some calls."""
        while self._past:
            self._group.settle(self._past.pop())

    def note(self, generation: str, outcome: str) -> None:
        """Note how a save ended."""
        self._last = (generation, outcome)

    def agree(
        self, incarnation: int, snapshot: Callable[[], Snapshot], name_generation: Callable[[int], str]
    ) -> Agreed:
        """Capture on all ranks, and return the plan.

        Args:
            incarnation: The claimed number; part of all topics.
            snapshot: Captures this rank's boundary.
            name_generation: Gives a new generation's name for a step; called on the leader.

        Raises:
            SafepointError: What a rank's capture, or the leader's naming, raised; on all ranks.
            AbortedError: A rank was absent, stands at another step, or holds what does not fit the others'.
            LeaderLostError: The leader's word did not come.

        Spec: C2.
        """
        if self._group.world_size == 1:
            return self._alone(snapshot(), name_generation)
        if incarnation != self._incarnation:
            self._incarnation, self._attempt, self._unheard = incarnation, 0, []
        taken = _taken(snapshot, self._own_layouts)
        while True:
            topic, leaders_step, leaders = self._meet(taken)
            try:
                return self._answered(topic, taken, name_generation, leaders)
            except AbortedError as exc:
                is_behind = isinstance(taken, _Taken) and leaders_step < taken.snapshot.progress.step
                if not (is_behind and exc.where == f"{topic}/offers/parts"):
                    raise
                _log.info("passing over a save at step %d that this rank took no part in", leaders_step)

    def _meet(self, taken: _Taken | SafepointError) -> tuple[str, int, str]:
        """Return the topic at which the ranks meet, the leader's step, and the digest of its own conditions.

        Once the leader's word is said, also if that is an error, the attempt is over.
        """
        topic = f"plan/{self._incarnation}/{self._attempt}"
        word = b"%d " % self._attempt
        if self._group.rank == 0:
            self._attempt += 1
            self._topics.append(topic)
            # The word of an attempt that failed at once is an error, which a rank may still have to read.
            if isinstance(taken, _Taken):
                unheard, self._unheard = self._unheard, [*self._unheard[1 - _MOST_UNHEARD :], topic]
                for earlier in unheard:
                    # Whoever lost the word of an earlier attempt still waits for it, and is told where the ranks are.
                    lead(self._group, earlier, lambda: word + _stand_of(taken), deadline_s=self._deadline_s)
        try:
            # The leader comes when it has tidied up after the save before.
            said = lead(self._group, topic, lambda: word + _stand_of(taken), deadline_s=2 * self._deadline_s)
        except LeaderLostError:
            raise
        except SafepointError:
            self._attempt += self._group.rank != 0
            raise
        attempt, step, leaders = said.decode("ascii").split()
        self._attempt = int(attempt) + 1
        return f"plan/{self._incarnation}/{attempt}", int(step), leaders

    def _alone(self, snapshot: Snapshot, name_generation: Callable[[int], str]) -> Agreed:
        """Plan for one rank, which writes all it holds."""
        layout, tensors = self._own_layouts.of(snapshot.items)
        if layout != self._alone_with or self._division is None:
            self._division, part = divide_alone(layout)
            self._divided, self._alone_with = (self._division.digests[0], part), layout
        items = {item.name: PlannedItem(item.type, "global", 0) for item in snapshot.items}
        step = snapshot.progress.step
        plan = Plan(name_generation(step), step, self._divided[0], items, False, *self._last)
        return Agreed(snapshot, plan, layout, tensors, self._divided[1], self._division)

    def _answered(
        self, topic: str, taken: _Taken | SafepointError, name_generation: Callable[[int], str], leaders: str
    ) -> Agreed:
        offers: list[_Offer] = []

        def offer() -> bytes:
            if isinstance(taken, SafepointError):
                raise taken
            step, said = taken.snapshot.progress.step, said_by(taken.snapshot, leaders=leaders)
            made = _Offer(step, taken.columns.digest, self._divided[0], taken.offers, said)
            return msgspec.msgpack.encode(made)

        def answer(parts: list[bytes]) -> bytes:
            offers.extend(_decoded(part, _Offer, f"rank {rank}") for rank, part in enumerate(parts))
            check_steps([one.step for one in offers])
            _check_said(taken, offers)
            self._keep_layouts(taken, offers)
            wanted = {one.layout: rank for rank, one in reversed(list(enumerate(offers)))}
            missing = tuple(sorted(rank for digest, rank in wanted.items() if digest not in self._layouts))
            return msgspec.msgpack.encode(
                _Answer(None, missing) if missing else _Answer(self._plan(offers, name_generation))
            )

        def plan(parts: list[bytes]) -> bytes:
            reader = ColumnsReader()
            for rank, part in enumerate(parts):
                if part:
                    layout = reader.decode(part, digest=offers[rank].layout, where=f"rank {rank}")
                    self._layouts[layout.digest] = layout
            return msgspec.msgpack.encode(_Answer(self._plan(offers, name_generation)))

        told = _decoded(
            join(self._group, f"{topic}/offers", offer, answer, deadline_s=self._deadline_s), _Answer, topic
        )
        if not isinstance(taken, _Taken):
            raise InternalError("a capture that failed was planned with", where=topic)
        self._past += [earlier for earlier in self._topics if earlier != topic]
        self._topics, self._unheard = [topic], []
        if told.plan is None:
            is_wanted = self._group.rank in told.wanted
            sent = encode_columns(taken.columns) if is_wanted else b""
            whole = join(self._group, f"{topic}/layouts", lambda: sent, plan, deadline_s=self._deadline_s)
            told = _decoded(whole, _Answer, topic)
        if told.plan is None:
            raise InternalError("the leader has not made a plan", where=topic)
        if self._last == (told.plan.previous, UNKNOWN):
            _log.info("the save %s, whose outcome was unknown here, was %s", told.plan.previous, told.plan.outcome)
        self._take_part(topic, told.plan, taken.layout, offers)
        division = self._division if self._group.rank == 0 else None
        types = {name: item.type for name, item in told.plan.items.items()}
        snapshot = settled(taken.snapshot, told.plan.totals, [one.said for one in offers], types)
        return Agreed(snapshot, told.plan, taken.layout, taken.tensors, self._divided[1], division)

    def _keep_layouts(self, taken: _Taken | SafepointError, offers: Sequence[_Offer]) -> None:
        """Keep the layouts that are in use, the leader's own among them."""
        if isinstance(taken, _Taken):
            self._layouts[taken.columns.digest] = taken.columns
        used = {one.layout for one in offers}
        self._layouts = {digest: layout for digest, layout in self._layouts.items() if digest in used}

    def _plan(self, offers: Sequence[_Offer], name_generation: Callable[[int], str]) -> Plan:
        layouts = [self._layouts[one.layout] for one in offers]
        items = _planned_items(offers, layouts)
        own = sorted(name for name, item in items.items() if item.kind == "per_rank")
        compares = bool(self._compares_every) and self._count % self._compares_every == 0
        # What ranks hold in common is one state only where this save finds that they hold the same, or fails.
        spreads = compares and self._refuses_difference
        digest = digest_bytes(msgspec.json.encode([[one.layout for one in offers], own, spreads]))
        if digest != self._made or self._division is None:
            self._division = divide(layouts, frozenset(own), spreads=spreads)
            self._made = digest
        self._count += 1
        step = offers[0].step
        totals = find_totals([one.said for one in offers])
        return Plan(name_generation(step), step, digest, items, compares, *self._last, totals)

    def _take_part(self, topic: str, plan: Plan, layout: Layout, offers: Sequence[_Offer]) -> None:
        """Give the ranks their parts of a division that they do not know, or receive it."""
        own = f"{topic}/part/{self._group.rank}"
        if self._group.rank != 0:
            if self._divided[0] != plan.division:
                message = self._group.spread(own, None, deadline_s=self._deadline_s)
                self._divided = (plan.division, decode_part(message, layout, where=own))
            return
        if self._division is None:
            raise InternalError("a plan was made without a division", where=topic)
        if self._divided[0] != plan.division:
            self._divided = (plan.division, decode_part(self._division.parts[0], layout, where=own))
        for rank, one in enumerate(offers[1:], start=1):
            if one.division != plan.division:
                self._group.spread(f"{topic}/part/{rank}", self._division.parts[rank], deadline_s=self._deadline_s)


def _taken(snapshot: Callable[[], Snapshot], layouts: Layouts) -> _Taken | SafepointError:
    """Capture, and return what came of it: a failure is told to the other ranks before it is raised."""
    try:
        made = snapshot()
        layout, tensors = layouts.of(made.items)
        divided = {box.item for box in layout.boxes if box.is_part}
        offers = {item.name: _item_offer(item, divided, made.kinds.get(item.name, "")) for item in made.items}
        return _Taken(made, layout, layouts.columns(), tensors, offers)
    except SafepointError as exc:
        return exc
    except Exception as exc:  # noqa: BLE001 (told to the other ranks, which would wait in vain, and raised)
        error = AbortedError("a rank could not capture its state", found=f"{type(exc).__name__}: {exc}")
        error.__cause__ = exc
        return error


def _item_offer(item: SnapshotItem, divided: set[str], kind: str) -> _ItemOffer:
    tree = digest_bytes(item.tree)
    # By shapes alone a rank that holds a distributed tensor whole, or nothing of it, would not know.
    is_divided = item.type in _DIVIDED or item.name in divided or item.division
    return _ItemOffer(item.type, tree, "" if is_divided else digest_state(item), item.division, kind)


def _stand_of(taken: _Taken | SafepointError) -> bytes:
    if isinstance(taken, SafepointError):
        raise taken
    return f"{taken.snapshot.progress.step} {digest_of(own_of(taken.snapshot.conditions))}".encode("ascii")


def _check_said(taken: _Taken | SafepointError, offers: Sequence[_Offer]) -> None:
    if isinstance(taken, _Taken):
        trees = [{name: item.tree for name, item in one.items.items()} for one in offers]
        check_alike([one.said for one in offers], trees, accepts=taken.snapshot.accepts)


def _planned_items(offers: Sequence[_Offer], layouts: Sequence[Columns]) -> dict[str, PlannedItem]:
    """Return the kind of each item and who stores its tree."""
    in_parts = divided_items({layout.digest: layout for layout in layouts}.values())
    holders: dict[str, dict[int, _ItemOffer]] = {}
    for rank, one in enumerate(offers):
        for name, item in one.items.items():
            holders.setdefault(name, {})[rank] = item
    planned = {}
    for name, held in holders.items():
        type_name = check_types({rank: item.type for rank, item in held.items()}, item=name)
        trees = {rank: item.tree for rank, item in held.items()}
        states = {rank: item.state for rank, item in held.items()}
        kinds = {rank: item.kind for rank, item in held.items()}
        compared = {} if type_name in _DIVIDED else trees
        kind = find_kind(states, kinds, item=name, is_in_parts=name in in_parts, trees=compared, layouts=layouts)
        keeper = min(held) if len(set(trees.values())) == 1 and kind != "per_rank" else None
        ranks = None if len(held) == len(offers) else tuple(sorted(held))
        divisions = tuple(sorted({item.division for item in held.values()}))
        planned[name] = PlannedItem(type_name, kind, keeper, ranks, divisions)
    return planned


def _decoded(message: bytes, kind: type[_Record], where: str) -> _Record:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except msgspec.DecodeError as exc:
        raise AbortedError("a message of another rank cannot be decoded", where=where, found=str(exc)) from exc
