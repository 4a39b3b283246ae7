"""Asked: how one checkpoint of a run is asked for, by its step or by the name of its generation.

A step may stand on several branches; a name stands for one generation of any lineage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from safepoint.errors import RequestError
from safepoint.format.names import GenerationName

Asked = int | GenerationName

_MOST_STEP_DIGITS = 18
_EXPECTED = "a number of updates, or a generation's name"


def is_asked_text(text: str) -> bool:
    """Return whether a text, such as what follows ``RUN@``, is a step or a generation's name."""
    return (text.isascii() and text.isdigit()) or GenerationName.parse(text) is not None


def parse_asked(text: str) -> Asked:
    """Return what a typed text asks for.

    Raises:
        RequestError: It is neither a step nor a generation's name.
    """
    name = GenerationName.parse(text)
    if name is not None:
        return name
    if not is_asked_text(text):
        raise RequestError("neither a step nor a generation's name", where=text, expected=_EXPECTED)
    if len(text) > _MOST_STEP_DIGITS:
        raise RequestError("a step is too large", where=text, expected=f"at most {_MOST_STEP_DIGITS} digits")
    return int(text)


def asked_of(step: object) -> Asked:
    """Return what a caller asks for by `step`: a number of updates, or a generation's name as text.

    Raises:
        RequestError: It is neither.
    """
    name = GenerationName.parse(step) if isinstance(step, str) else None
    if name is not None:
        return name
    if type(step) is not int or step < 0:
        raise RequestError("a step is a number of updates", where="step", expected=_EXPECTED, found=repr(step)[:80])
    return step


def as_argument(asked: Asked) -> int | str:
    """Return what a caller writes for it as `step`."""
    return str(asked) if isinstance(asked, GenerationName) else asked


def arguments_of(names: Sequence[GenerationName]) -> dict[GenerationName, int | str]:
    """Return what a caller writes as `step` for each of some generations: its step, if no other one has it, or name."""
    counts = Counter(name.step for name in names)
    return {name: name.step if counts[name.step] == 1 else str(name) for name in names}


def fits(name: GenerationName, asked: Asked | None) -> bool:
    """Return whether a generation is what was asked for; any is where nothing was."""
    return asked is None or asked in (name, name.step)


def step_of(asked: Asked) -> int:
    """Return the step of what was asked for."""
    return asked.step if isinstance(asked, GenerationName) else asked


def told(asked: Asked) -> str:
    """Return what was asked for in words."""
    return f"the generation {asked}" if isinstance(asked, GenerationName) else f"step {asked}"
