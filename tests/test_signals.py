"""Listening to signals: which ones, whose handlers run, and that everything is put back."""

from __future__ import annotations

import faulthandler
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import safepoint as sp
from safepoint.ambient import SystemAmbient
from safepoint.errors import RequestError
from safepoint.group.solo import SoloGroup
from safepoint.signals import DEFAULT_SIGNALS, SignalRelay, Signals, on_signals
from safepoint.stop import Stop

USED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Check that every signal is at the end as at the beginning, where a test that failed may have left its manager."""
    before = [signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL for number in USED]
    signal.set_wakeup_fd(-1)
    for number, handler in zip(USED, before, strict=True):
        signal.signal(number, handler)
    yield
    after = [signal.getsignal(number) for number in USED]
    for number, handler in zip(USED, before, strict=True):
        signal.signal(number, handler)
    assert after == before


class Clock(SystemAmbient):
    """A clock that a test moves on."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def listening(setting: Signals, ambient: SystemAmbient | None = None) -> Stop:
    stop = Stop(setting, SoloGroup(), ambient or SystemAmbient())
    stop.listen(deadline_s=1.0)
    return stop


def wait_until(reached: Callable[[], object]) -> None:
    """Wait for another thread, and let handlers run meanwhile."""
    for _ in range(6000):
        if reached():
            return
        signal.sigtimedwait([], 0.01)
    raise AssertionError("it does not come about")


def be_saved(stop: Stop) -> None:
    order = stop.decide(needs_s=0.0)
    assert order is not None
    stop.follow(order, step=1, needs_s=0.0)
    stop.conclude(is_committed=True)


def test_the_first_signal_is_noted_and_obeyed_once_at_a_boundary() -> None:
    stop = listening(on_signals("USR1", "USR2"))
    assert stop.decide(needs_s=0.0) is None
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    order = stop.decide(needs_s=0.0)
    assert order is not None and (order.number, order.has_time) == (signal.SIGUSR2, True)
    stop.follow(order, step=3, needs_s=0.0)
    assert stop.decide(needs_s=0.0) is None
    assert not stop.should_stop
    stop.conclude(is_committed=True)
    assert stop.should_stop and stop.exit_code == 75
    stop.close()


def test_a_signal_that_no_boundary_has_followed_is_sent_anew_at_the_end() -> None:
    met: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: met.append(number))
    stop = listening(on_signals("USR1"))
    signal.raise_signal(signal.SIGUSR1)
    stop.close()
    stop.get_its_way()
    assert met == [signal.SIGUSR1] * 2
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_signal_that_an_exception_has_overtaken_reaches_whoever_goes_on(tmp_path: Path) -> None:
    met: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: met.append(number))
    setting = on_signals("USR1", grace_s=0.5)
    with pytest.raises(KeyError), sp.CheckpointManager(tmp_path, {"counts": {"n": 0}}, signals=setting):
        signal.raise_signal(signal.SIGUSR1)
        raise KeyError
    wait_until(lambda: len(met) == 2)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_second_interrupt_takes_the_wish_back_and_the_next_one_asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, taken = listening(on_signals("INT")), []
    withdraw = stop.withdraw

    def watched(number: int) -> None:
        withdraw(number)
        taken.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(stop, "withdraw", watched)
    for _ in range(2):
        taken.clear()
        signal.raise_signal(signal.SIGINT)
        assert stop.decide(needs_s=0.0) is not None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        wait_until(lambda: sorted(taken) == [False, True])
        assert stop.decide(needs_s=0.0) is None and stop.left_s() is None
    signal.raise_signal(signal.SIGINT)
    be_saved(stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    stop.close()


def test_a_signal_after_the_last_save_gets_its_way_when_the_grace_period_is_over() -> None:
    class Ended(Exception):
        pass

    has_ended: list[bool] = []

    def end(number: int, frame: object) -> None:
        # The thread may let the program go once more while the test goes on.
        if not has_ended:
            raise Ended

    signal.signal(signal.SIGUSR1, end)
    clock = Clock()
    stop = listening(on_signals("USR1", grace_s=1000.0), clock)
    signal.raise_signal(signal.SIGUSR1)
    be_saved(stop)
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(Ended):
        clock.ahead_s = 1001.0
        signal.raise_signal(signal.SIGUSR1)
        wait_until(lambda: False)
    has_ended.append(True)
    stop.close()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_several_managers_of_a_process_hear_a_signal_and_the_last_one_puts_it_back() -> None:
    first, second = listening(on_signals("USR1")), listening(on_signals("USR1", "USR2"))
    relay = signal.getsignal(signal.SIGUSR1)
    assert isinstance(relay, SignalRelay) and signal.getsignal(signal.SIGUSR2) is relay
    first.close()
    signal.raise_signal(signal.SIGUSR1)
    assert first.decide(needs_s=0.0) is None
    be_saved(second)
    second.close()


def test_a_manager_that_nobody_holds_any_more_keeps_no_signal() -> None:
    met: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: met.append(number))
    before = signal.getsignal(signal.SIGUSR1)
    forgotten: list[Stop] = [listening(on_signals("USR1")), listening(on_signals("USR2", "USR1"))]
    forgotten.append(forgotten)  # type: ignore[arg-type]
    del forgotten
    gc.collect()
    assert signal.getsignal(signal.SIGUSR1) is before
    signal.raise_signal(signal.SIGUSR1)
    assert met == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_the_last_listener_may_be_removed_again_when_the_thread_has_ended() -> None:
    stop = listening(on_signals("USR1"))
    relay: Any = signal.getsignal(signal.SIGUSR1)
    stop.close()
    wait_until(lambda: relay._reader.closed)
    relay.remove()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_handler_that_is_installed_later_takes_the_place() -> None:
    stop = listening(on_signals("USR1"))
    relay: Any = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    assert relay._hand_over(signal.SIGUSR1) == 0
    assert stop.decide(needs_s=0.0) is None
    signal.signal(signal.SIGUSR1, relay)
    assert relay._hand_over(signal.SIGUSR1) == signal.SIGUSR1
    be_saved(stop)
    stop.close()


def test_a_manager_made_later_hears_a_signal_whose_handler_was_replaced_and_each_runs_once() -> None:
    first = listening(on_signals("USR1", "USR2"))
    found: Any = signal.getsignal(signal.SIGUSR1)
    met: list[int] = []

    def chained(number: int, frame: Any) -> None:
        met.append(number)
        found(number, frame)

    signal.signal(signal.SIGUSR1, chained)
    second = listening(on_signals("USR2", "USR1"))
    signal.raise_signal(signal.SIGUSR1)
    assert met == [signal.SIGUSR1]
    for one in (first, second):
        be_saved(one)
        one.close()
    assert signal.getsignal(signal.SIGUSR1) is chained
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    stop = listening(on_signals("USR2"))
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    stop.close()
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="nothing tells of such handlers")
def test_a_handler_that_is_not_pythons_stays_in_its_place(tmp_path: Path) -> None:
    with open(tmp_path / "stacks", "w+") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        stop = listening(on_signals("USR2"))
        signal.raise_signal(signal.SIGUSR2)
        assert stop.decide(needs_s=0.0) is None
        stop.close()
        faulthandler.unregister(signal.SIGUSR2)
        file.seek(0)
        assert "most recent call first" in file.read()


def test_another_thread_than_the_main_one_listens_to_nothing_unless_it_is_told_to() -> None:
    met: list[Any] = []

    def make() -> None:
        for setting in (DEFAULT_SIGNALS, on_signals("TERM")):
            try:
                met.append(listening(setting))
            except RequestError as exc:
                met.append(exc)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert isinstance(met[0], Stop) and isinstance(met[1], RequestError)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("KILL",), {}),
        (("TERM", "NONSENSE"), {}),
        ((), {"grace_s": 0}),
        ((), {"grace_s": True}),
        ((), {"then": "kill"}),
    ],
)
def test_a_setting_that_makes_no_sense_is_a_wrong_call(names: tuple[str, ...], options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        on_signals(*names, **options)


def test_names_may_be_long_or_short() -> None:
    assert on_signals("SIGTERM", "TERM", "USR1") == on_signals()
    assert on_signals("SIGINT").numbers == (signal.SIGINT,)
