"""A call that cannot be meant is refused by the library's own error, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import safepoint as sp
from safepoint.retention.policy import Keep
from safepoint.schedule import Schedule

WRONG_VALUES: dict[str, Callable[[], object]] = {
    "updates below 1": lambda: Schedule(updates=-3),
    "updates as text": lambda: sp.every(updates="3"),  # type: ignore[arg-type]
    "minutes as text": lambda: sp.every(minutes="x"),  # type: ignore[arg-type]
    "minutes below 0": lambda: Schedule(minutes=-1.0),
    "nothing to keep": lambda: Keep(last=-2),
    "every as a fraction": lambda: Keep(1, every=2.5),  # type: ignore[arg-type]
    "a probe that is no function": lambda: sp.Probe(5),  # type: ignore[arg-type]
    "a tolerance below 0": lambda: sp.Probe(lambda: 1.0, tolerance=-1),
    "a run that is a number": lambda: sp.open_run(5),  # type: ignore[arg-type]
    "a run that is nothing": lambda: sp.open_run(None),  # type: ignore[arg-type]
}

WRONG_CALLS: dict[str, Callable[[sp.CheckpointManager], object]] = {
    "metrics as text": lambda manager: manager.after_update(metrics="loss"),  # type: ignore[arg-type]
    "a metric beyond any float": lambda manager: manager.after_update(metrics={"loss": 2**2000}),
    "skip=None": lambda manager: manager.restore(skip=None),  # type: ignore[arg-type]
    "skip of a list": lambda manager: manager.restore(skip=[["loop"]]),  # type: ignore[list-item]
    "step as text": lambda manager: manager.restore(step="1"),  # type: ignore[arg-type]
    "step as a fraction": lambda manager: manager.restore(step=1.0),  # type: ignore[arg-type]
    "step as a switch": lambda manager: manager.restore(step=True),
}


@pytest.mark.parametrize("make", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_wrong_value_is_refused_where_it_is_given(make: Callable[[], object]) -> None:
    with pytest.raises(sp.RequestError):
        make()


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_is_refused_and_the_manager_goes_on(
    tmp_path: Path, call: Callable[[sp.CheckpointManager], object]
) -> None:
    with sp.CheckpointManager(tmp_path, {"loop": {"n": 0}}) as manager:
        manager.after_update()
        manager.save()
        with pytest.raises(sp.RequestError):
            call(manager)
        manager.after_update()
        assert manager.progress.step == 2


def test_a_container_that_holds_itself_is_refused_at_the_save(tmp_path: Path) -> None:
    loop: dict[str, object] = {"n": 0}
    loop["again"] = loop
    with sp.CheckpointManager(tmp_path, {"loop": loop}) as manager:
        manager.restore()
        with pytest.raises(sp.RequestError, match="loop"):
            manager.save()
