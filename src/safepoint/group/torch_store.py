"""A board on a key-value store of torch's that belongs to us alone, and the group over it.

1. The store's server runs in the leader's process. Its place is told by one broadcast when the group is opened; that is
   the only collective. All else is point to point, may run in any thread, and no process group's time-out applies.
2. Each thread that talks has a client of its own: a client is one lock, and one connection.
3. Each call of a client runs in a thread beside its caller. While the leader's process is stopped, or its host cut off,
   `check` and even the connecting wait without end, whatever the store's own time-out (tried with torch 2.13).
4. `get` waits for a key that is absent, so `check` comes first.
5. A value above 8 MiB costs the connection (tried with torch 2.13): longer messages are stored in parts, the head last.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from safepoint.ambient import Ambient
from safepoint.errors import AbortedError, InternalError, LeaderLostError, RequestError
from safepoint.group.base import Group
from safepoint.group.board_group import GRACE_S, BoardGroup
from safepoint.group.socket_bell import BellPlace, reach_bell, serve_bell
from safepoint.group.solo import SoloGroup

PART_BYTES = (1 << 20) - 8
MESSAGE_LIMIT_BYTES = 1 << 30

_HEAD_BYTES = 8
_PLACE_BYTES = 4096
_NAMESPACE_BYTES = 8
_CONNECT_S = 10.0
# After a connection broke, or an answer stayed away, the server is most likely gone, and a refused connection is tried
# until its time is over.
_RECONNECT_S = 2.0
_SIGN = "board"
_LOOPBACK = "127.0.0.1"

_Result = TypeVar("_Result")


def open_group(
    *,
    ambient: Ambient,
    process_group: dist.ProcessGroup | None = None,
    host: str | None = None,
    deadline_s: float = 60.0,
    grace_s: float = GRACE_S,
) -> Group:
    """Make a group of the ranks of a process group.

    This is a collective call: all ranks of the process group make it, in their main thread. Ranks are those of the
    process group; its rank 0 leads.

    Args:
        ambient: Gives the clock, `MASTER_ADDR`, this host's name, and a name that no other group has.
        process_group: The ranks. Default: the default group.
        host: The name or address under which the other ranks reach this process; used on the leader. Default:
            `MASTER_ADDR` where this is its process, then the host's own name, then the loopback.
        deadline_s: The longest wait until all ranks are connected.
        grace_s: How much longer than the leader a rank waits for the leader's word.

    Raises:
        RequestError: torch.distributed is not initialised, or this process is no member of the process group.
        AbortedError: The leader could not open its store, or ranks did not connect.
    """
    if not dist.is_initialized():
        raise RequestError("torch.distributed is not initialised", remedy="Call init_process_group first.")
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise RequestError("this process is not a member of the process group", where=f"rank {dist.get_rank()}")
    if world_size == 1:
        return SoloGroup()
    board, failure = _served(ambient, host) if rank == 0 else (None, "")
    bell, bell_place = serve_bell(world_size, ambient=ambient) if board is not None else (None, None)
    place = (
        Place((), 0, "", failure=failure) if board is None else msgspec.structs.replace(board.place, bell=bell_place)
    )
    place = _tell(place, process_group)
    if place.failure:
        raise AbortedError("the leader could not open a store for the ranks", where="rank 0", found=place.failure)
    group = BoardGroup(
        board if board is not None else TorchStoreBoard(place),
        rank=rank,
        world_size=world_size,
        ambient=ambient,
        grace_s=grace_s,
        bell=bell if bell is not None else reach_bell(place.hosts, place.bell, ambient=ambient),
    )
    group.gather("opened", b"", deadline_s=deadline_s)
    return group


def find_group(*, ambient: Ambient, process_group: dist.ProcessGroup | None, deadline_s: float) -> Group:
    """Return the group of a job: that of its ranks where torch.distributed is initialised, else this process alone.

    Raises:
        RequestError: A process group is given, and torch.distributed is not initialised; or as `open_group` does.
        AbortedError: As `open_group` does.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return SoloGroup()
    return open_group(ambient=ambient, process_group=process_group, deadline_s=deadline_s)


def serve(hosts: tuple[str, ...], *, ambient: Ambient) -> TorchStoreBoard:
    """Start a server in this process, and return its board.

    Args:
        hosts: The names or addresses under which other processes may reach it, in the order in which to try them.
        ambient: Gives a name that no other board has.

    Raises:
        RuntimeError: The server could not be started.
    """
    namespace = ambient.token(_NAMESPACE_BYTES)
    server = _tcp_store(_LOOPBACK, 0, is_server=True, wait_s=_CONNECT_S)
    # What tells this board from any other server at the same port of another host.
    server.set(f"{namespace}/{_SIGN}", b"1")
    return TorchStoreBoard(Place(hosts, server.port, namespace), server=server)


class _Store(Protocol):
    """Be what is used of a `torch.distributed.TCPStore`."""

    @property
    def port(self) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def set(self, key: str, value: Any) -> None: ...  # Any: bytes, where torch's stubs say str

    def delete_key(self, key: str) -> bool: ...


class Place(msgspec.Struct, frozen=True):
    """Say where a board is: the hosts to try, in order, the port, and the beginning of all its keys.

    `failure` is not empty where there is none. `bell` is that of the group, if it has one.
    """

    hosts: tuple[str, ...]
    port: int
    namespace: str
    failure: str = ""
    bell: BellPlace | None = None


class TorchStoreBoard:
    """Keep messages in the leader's store.

    Args:
        place: Where the store is.
        server: The server, which lives as long as this board; on the leader only.
    """

    def __init__(self, place: Place, *, server: _Store | None = None) -> None:
        self.place = place
        self._hosts = (_LOOPBACK,) if server is not None else place.hosts
        self._server = server
        self._lock = threading.Lock()
        self._part_counts: dict[str, int] = {}
        self._lines = threading.local()
        self._is_closed = False
        self._is_broken = False

    def post(self, key: str, message: bytes, *, limit_s: float) -> None:
        """Store a message, its head last."""
        if len(message) > MESSAGE_LIMIT_BYTES:
            raise InternalError(
                "a message is too long", where=key, expected=f"at most {MESSAGE_LIMIT_BYTES} bytes", found=len(message)
            )
        with self._lock:
            self._part_counts[key] = _part_count(len(message))
        self._call(lambda store: _store(store, self._full(key), message), limit_s)

    def look(self, key: str, *, limit_s: float) -> bytes | None:
        """Fetch a message."""
        return self._call(lambda store: _fetch(store, self._full(key)), limit_s)

    def take(self, keys: Sequence[str], *, limit_s: float) -> dict[str, bytes]:
        """Fetch messages, and delete them."""

        def act(store: _Store) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            for key in keys:
                message = _fetch(store, self._full(key))
                if message is not None:
                    found[key] = message
                    _delete(store, self._full(key), _part_count(len(message)))
            return found

        return self._call(act, limit_s)

    def remove(self, keys: Sequence[str], *, limit_s: float) -> None:
        """Delete what was posted here."""
        with self._lock:
            counts = [(key, self._part_counts.pop(key, 0)) for key in keys]

        def act(store: _Store) -> None:
            for key, part_count in counts:
                _delete(store, self._full(key), part_count)

        self._call(act, limit_s)

    def close(self) -> None:
        """Let go of this thread's client and of the server; clients of other threads end with their threads."""
        self._is_closed = True
        self._drop_line()
        self._server = None

    def _full(self, key: str) -> str:
        return f"{self.place.namespace}/{key}"

    def _call(self, act: Callable[[_Store], _Result], limit_s: float) -> _Result:
        if self._is_closed:
            raise self._lost("the connection is closed")
        line: _Line | None = getattr(self._lines, "line", None)
        if line is None:
            line = self._lines.line = _Line(self._connect)
        call = line.call(act)
        if not call.done.wait(max(0.0, limit_s)):
            # The thread at the other end may be stuck for good; it is left to itself, and the next call has another.
            self._drop_line()
            self._is_broken = True
            raise self._lost(f"no answer within {limit_s:.3g} s")
        if call.error is not None:
            self._drop_line()
            # Errors of the store are RuntimeErrors; before torch 2.6 some have no class of their own.
            if isinstance(call.error, RuntimeError):
                self._is_broken = True
                raise self._lost(str(call.error).partition("\n")[0]) from call.error
            raise call.error
        result: _Result = call.result
        return result

    def _connect(self) -> _Store:
        failure = "no host"
        for host in self._hosts:
            try:
                store = _tcp_store(
                    host, self.place.port, is_server=False, wait_s=_RECONNECT_S if self._is_broken else _CONNECT_S
                )
                if store.check([self._full(_SIGN)]):
                    self._hosts, self._is_broken = (host,), False
                    return store
                failure = f"{host} serves another store at port {self.place.port}"
            except RuntimeError as exc:
                failure = str(exc).partition("\n")[0]
        raise RuntimeError(failure)

    def _drop_line(self) -> None:
        line: _Line | None = getattr(self._lines, "line", None)
        if line is not None:
            line.end()
            self._lines.line = None

    def _lost(self, found: str) -> LeaderLostError:
        return LeaderLostError(
            "the store of rank 0 cannot be reached",
            where=f"{' or '.join(self.place.hosts)}, port {self.place.port}",
            found=found,
            remedy="See whether the process of rank 0 runs and its host can be reached.",
        )


class _Call:
    """Hold one call on its way to the thread that makes it, and what came of it."""

    def __init__(self, act: Callable[[_Store], Any]) -> None:
        self.act = act
        self.done = threading.Event()
        # Any: a line carries calls of every result.
        self.result: Any = None
        self.error: Exception | None = None


class _Line:
    """Be one client, used by a thread of its own, so that a caller need not wait longer than it wants to."""

    def __init__(self, connect: Callable[[], _Store]) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.end = weakref.finalize(self, self._calls.put, None)
        # A daemon: one that is stuck must not keep the process alive.
        threading.Thread(target=_work, args=(connect, self._calls), name="safepoint-store", daemon=True).start()

    def call(self, act: Callable[[_Store], Any]) -> _Call:
        """Hand a call over; its `done` is set when it was made."""
        call = _Call(act)
        self._calls.put(call)
        return call


def _work(connect: Callable[[], _Store], calls: queue.SimpleQueue[_Call | None]) -> None:
    store: _Store | None = None
    while (call := calls.get()) is not None:
        try:
            store = store if store is not None else connect()
            call.result = call.act(store)
        except Exception as exc:  # noqa: BLE001 (the top of a thread: handed to the caller)
            call.error = exc
        call.done.set()


def _store(store: _Store, key: str, message: bytes) -> None:
    head = len(message).to_bytes(_HEAD_BYTES, "big")
    part_count = _part_count(len(message))
    if not part_count:
        head += message
    for number in range(part_count):
        part = message[number * PART_BYTES : (number + 1) * PART_BYTES]
        store.set(f"{key}#{number}", part)
    store.set(key, head)


def _fetch(store: _Store, key: str) -> bytes | None:
    if not store.check([key]):
        return None
    head = store.get(key)
    part_count = _part_count(int.from_bytes(head[:_HEAD_BYTES], "big"))
    if not part_count:
        return head[_HEAD_BYTES:]
    parts = [f"{key}#{number}" for number in range(part_count)]
    return b"".join(store.get(part) for part in parts) if store.check(parts) else None


def _delete(store: _Store, key: str, part_count: int) -> None:
    # The head goes first: a message is there as long as its head is.
    for name in (key, *(f"{key}#{number}" for number in range(part_count))):
        store.delete_key(name)


def _part_count(size_bytes: int) -> int:
    """Return in how many parts a message is stored beside its head; a short one lies in the head itself."""
    return 0 if size_bytes <= PART_BYTES else -(-size_bytes // PART_BYTES)


def _served(ambient: Ambient, host: str | None) -> tuple[TorchStoreBoard | None, str]:
    """Return the leader's board, or why there is none: the others wait for either."""
    master = ambient.variable("MASTER_ADDR") if dist.get_rank() == 0 else None
    names = (host,) if host else (master, ambient.process().host, _LOOPBACK)
    try:
        return serve(tuple(dict.fromkeys(name for name in names if name)), ambient=ambient), ""
    except RuntimeError as exc:
        return None, str(exc).partition("\n")[0] or type(exc).__name__


def _tcp_store(host: str, port: int, *, is_server: bool, wait_s: float) -> _Store:
    store: _Store = dist.TCPStore(  # type: ignore[attr-defined]  # public in torch, and absent from its stubs
        host, port, None, is_server, timeout=timedelta(seconds=wait_s), wait_for_workers=False
    )
    return store


def _tell(place: Place, process_group: dist.ProcessGroup | None) -> Place:
    """Broadcast where the board is, as bytes: the object collectives of torch would unpickle them."""
    text = msgspec.json.encode(place)
    if len(text) > _PLACE_BYTES:
        raise InternalError("the place of the leader's store is too long to tell", found=len(text))
    source = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    padded = bytearray(text.ljust(_PLACE_BYTES))
    buffer = torch.frombuffer(padded, dtype=torch.uint8).to(_device(process_group))
    dist.broadcast(buffer, src=source, group=process_group)
    return msgspec.json.decode(bytes(buffer.cpu().numpy()), type=Place)


def _device(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the process group can send: the CPU if it can, else the current one of its kind."""
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config(process_group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
