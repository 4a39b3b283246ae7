"""The pipes between the drill and a run, also when one of the two dies first."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.events import Committed, Update
from safepoint.drill.pipes import Pipes
from safepoint.errors import CorruptionError, RequestError
from safepoint.evidence import PIPES_VARIABLE, Evidence


class Environment(SystemAmbient):
    """Give one variable."""

    def __init__(self, value: str) -> None:
        self.value = value

    def variable(self, name: str) -> str | None:
        return self.value if name == PIPES_VARIABLE else None


def test_events_arrive_in_order_and_each_waits_for_its_answer(tmp_path: Path) -> None:
    ambient = SystemAmbient()
    with Pipes(tmp_path, ambient) as pipes:
        evidence = Evidence.find(Environment(pipes.variable), {})

        def tell() -> None:
            evidence.tell("update", step=1)
            evidence.tell("committed", step=1, generation="g")

        run = threading.Thread(target=tell)
        run.start()
        deadline = ambient.monotonic() + 30
        assert pipes.next_event(deadline=deadline, has_ended=lambda: False) == Update(1)
        assert pipes.next_event(deadline=ambient.monotonic(), has_ended=lambda: False) is None
        pipes.answer("go")
        assert pipes.next_event(deadline=deadline, has_ended=lambda: False) == Committed(1, "g")
        pipes.answer("go")
        run.join(30)
        assert not run.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_told_before_it_died_is_still_heard(tmp_path: Path) -> None:
    with Pipes(tmp_path, SystemAmbient()) as pipes:
        with open(json.loads(pipes.variable)[0], "wb") as end:
            end.write(b'{"event": "update", "step": 3}\n{"event": "upda')
        deadline = SystemAmbient().monotonic() + 30
        assert pipes.next_event(deadline=deadline, has_ended=lambda: True) == Update(3)
        assert pipes.next_event(deadline=deadline, has_ended=lambda: True) is None


@pytest.mark.parametrize(
    "line", [b"not JSON", b'{"event": "unknown"}', b'{"step": 1}', b'{"event": "update"}', b"\xff"]
)
def test_a_line_that_is_no_event_is_refused(tmp_path: Path, line: bytes) -> None:
    with Pipes(tmp_path, SystemAmbient()) as pipes:
        with open(json.loads(pipes.variable)[0], "wb") as end:
            end.write(line + b"\n")
        with pytest.raises(CorruptionError, match="no event"):
            pipes.next_event(deadline=SystemAmbient().monotonic() + 30, has_ended=lambda: True)


@pytest.mark.timeout(20)
def test_a_run_whose_watcher_died_before_it_came_does_not_wait_for_it(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("events", "answers")]
    for path in paths:
        os.mkfifo(path)
    with pytest.raises(RequestError, match="watcher"):
        Evidence.find(Environment(json.dumps(paths)), {})


@pytest.mark.timeout(20)
def test_a_run_whose_watcher_dies_goes_on(tmp_path: Path) -> None:
    with Pipes(tmp_path, SystemAmbient()) as pipes:
        evidence = Evidence.find(Environment(pipes.variable), {})
    evidence.tell("update", step=1)
    evidence.tell("update", step=2)
