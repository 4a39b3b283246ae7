"""What every group must hold to, as functions that each rank calls; they need no particular transport."""

from __future__ import annotations

import threading
from collections.abc import Callable

from safepoint.errors import CorruptionError, Difference, MismatchError, SafepointError, StorageError
from safepoint.group.agreement import join, lead
from safepoint.group.base import Group

DEADLINE_S = 60.0
THREAD_COUNT = 4
# Around one part and several parts of a store whose values are 1 MiB at most.
SIZES = (0, 1, (1 << 20) - 9, (1 << 20) - 8, (1 << 20) - 7, 3 * (1 << 20) + 5)


def spread_reaches_every_rank(group: Group) -> None:
    for size in SIZES:
        message = pattern(size, 0)
        heard = group.spread(f"spread/{size}", message if group.rank == 0 else None, deadline_s=DEADLINE_S)
        assert heard == message


def gather_keeps_the_order_of_ranks(group: Group) -> None:
    for size in SIZES:
        gathered = group.gather(f"gather/{size}", pattern(size, group.rank), deadline_s=DEADLINE_S)
        expected = [pattern(size, rank) for rank in range(group.world_size)]
        assert gathered == (expected if group.rank == 0 else None)


def threads_do_not_disturb_each_other(group: Group) -> None:
    """Ranks start their threads in opposite orders, so that some always wait."""
    failures: list[BaseException] = []

    def talk(number: int) -> None:
        own = f"threads/{number}"
        try:
            for turn in range(5):
                gathered = group.gather(f"{own}/{turn}", f"{own}:{turn}:{group.rank}".encode(), deadline_s=DEADLINE_S)
                if group.rank == 0:
                    assert gathered == [f"{own}:{turn}:{rank}".encode() for rank in range(group.world_size)]
        except BaseException as exc:  # noqa: BLE001 (the top of a thread: handed to the caller)
            failures.append(exc)

    order = range(THREAD_COUNT) if group.rank % 2 else range(THREAD_COUNT - 1, -1, -1)
    threads = [threading.Thread(target=talk, args=(number,), daemon=True) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def what_a_rank_leaves_is_found_by_the_leader_when_it_looks(group: Group) -> None:
    assert group.rank or group.find("left", limit_s=DEADLINE_S) is None
    group.gather("left/looked", b"", deadline_s=DEADLINE_S)
    last = group.world_size - 1
    if last and group.rank == last:
        group.leave("left", b"earlier", limit_s=DEADLINE_S)
        group.leave("left", b"later", limit_s=DEADLINE_S)
    group.gather("left/there", b"", deadline_s=DEADLINE_S)
    if group.rank == 0:
        found = [group.find("left", limit_s=DEADLINE_S) for _ in range(2)]
        assert found == [b"later" if last else None] * 2


def a_value_of_the_leader_is_that_of_all(group: Group) -> None:
    assert lead(group, "lead/value", lambda: b"decided" if group.rank == 0 else b"unused", deadline_s=60) == b"decided"


def values_of_all_are_made_into_one(group: Group) -> None:
    whole = join(group, "join/value", lambda: b"%d" % group.rank, b"+".join, deadline_s=DEADLINE_S)
    assert whole == b"+".join(b"%d" % rank for rank in range(group.world_size))


def an_error_of_the_leader_is_that_of_all(group: Group) -> None:
    def refuse() -> bytes:
        raise MismatchError(
            "a checkpoint does not fit",
            where="item\udcff",
            expected=("a", 1),
            found=None,
            remedy="Choose another.",
            differences=[Difference("model.added", "w", "1", "2")],
        )

    error = raised(lambda: lead(group, "lead/error", refuse, deadline_s=DEADLINE_S))
    assert type(error) is MismatchError
    assert (str(error.expected), error.found, error.remedy) == ("('a', 1)", None, "Choose another.")
    assert error.differences == (Difference("model.added", "w", "1", "2"),)
    assert error.where in ("item\udcff", "item\\udcff")


def an_error_of_the_last_rank_is_that_of_all(group: Group) -> None:
    last = group.world_size - 1

    def write() -> bytes:
        if group.rank == last:
            raise StorageError("the disk is full", where="file", errno=28, retryable=True)
        return b""

    error = raised(lambda: join(group, "join/error", write, b"".join, deadline_s=DEADLINE_S))
    assert isinstance(error, StorageError)
    assert (type(error), str(error)) == (StorageError, f"the disk is full [rank {last}: file].")
    assert (error.errno, error.retryable) == (28, True)


def a_foreign_error_names_its_rank(group: Group) -> None:
    last = group.world_size - 1

    def fail() -> bytes:
        if group.rank == last:
            raise ZeroDivisionError("by zero")
        return b""

    error = raised(lambda: join(group, "join/foreign", fail, b"".join, deadline_s=DEADLINE_S))
    assert (error.code, str(error)) == ("aborted", f"a rank failed [rank {last}]; found ZeroDivisionError: by zero.")


def an_error_while_merging_is_that_of_all(group: Group) -> None:
    def merge(parts: list[bytes]) -> bytes:
        raise CorruptionError("the parts contradict each other", found=len(parts))

    error = raised(lambda: join(group, "join/merge", lambda: b"", merge, deadline_s=DEADLINE_S))
    assert (type(error), str(error.found)) == (CorruptionError, str(group.world_size))


EXCHANGES: tuple[Callable[[Group], None], ...] = (
    spread_reaches_every_rank,
    gather_keeps_the_order_of_ranks,
    threads_do_not_disturb_each_other,
    what_a_rank_leaves_is_found_by_the_leader_when_it_looks,
    a_value_of_the_leader_is_that_of_all,
    values_of_all_are_made_into_one,
    an_error_of_the_leader_is_that_of_all,
    an_error_of_the_last_rank_is_that_of_all,
    a_foreign_error_names_its_rank,
    an_error_while_merging_is_that_of_all,
)


def pattern(size_bytes: int, rank: int) -> bytes:
    """Return bytes that differ by rank, and whose 1 MiB parts differ too."""
    return bytes((rank + number) % 251 for number in range(251)) * (size_bytes // 251) + bytes([rank]) * (
        size_bytes % 251
    )


def raised(call: Callable[[], object]) -> SafepointError:
    try:
        call()
    except SafepointError as exc:
        return exc
    raise AssertionError("nothing was raised")
