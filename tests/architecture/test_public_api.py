"""The public names of safepoint and their signatures, pinned in ``public_api.txt`` beside this file.

A change of the interface is a decision. After taking it, write the file again and commit it with the change::

    python tests/architecture/test_public_api.py
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import safepoint

PINNED = Path(__file__).with_name("public_api.txt")
COMMAND = "python tests/architecture/test_public_api.py"


def test_public_names_and_signatures_are_those_that_are_pinned() -> None:
    difference = "\n".join(
        difflib.unified_diff(
            PINNED.read_text(encoding="utf-8").splitlines(), described(), "pinned", "found", lineterm="", n=1
        )
    )
    assert not difference, f"the public interface changed; if that is meant, run `{COMMAND}`\n{difference}"


def test_every_public_name_is_found_and_listed() -> None:
    assert len(safepoint.__all__) == len(set(safepoint.__all__))
    assert set(safepoint.__all__) <= set(dir(safepoint))
    for name in safepoint.__all__:
        assert getattr(safepoint, name) is not None, name


def test_type_checkers_see_the_names_that_python_sees() -> None:
    """The imports under TYPE_CHECKING and the table of homes are two lists of one thing."""
    assert safepoint.__file__ is not None
    tree = ast.parse(Path(safepoint.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"{home}.{name}" for name, home in safepoint._HOMES.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(safepoint, "no_such_name")


def test_every_public_class_and_function_says_what_it_does() -> None:
    silent = [
        name
        for name in safepoint.__all__
        if isinstance(value := getattr(safepoint, name), type | types.FunctionType) and not own_docstring(value)
    ]
    assert not silent


def own_docstring(value: type | types.FunctionType) -> str:
    """Return the docstring; the signature that dataclass puts in its place is none."""
    text = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    return "" if text is None or text.startswith(f"{value.__name__}(") else text


def described() -> list[str]:
    """Return one line for each public name and each public member of a class."""
    return [line for name in sorted(safepoint.__all__) for line in _lines(name, getattr(safepoint, name))]


def _lines(name: str, value: object) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        for inner in sorted(value.__all__):
            yield from _lines(f"{name}.{inner}", getattr(value, inner))
    elif isinstance(value, type):
        yield from _class_lines(name, value)
    elif callable(value):
        yield f"{name}{_signature(value)}"
    elif name == "__version__":
        yield name
    else:
        yield f"{name} = {_shown(value)}"


def _class_lines(name: str, value: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}({bases})" if bases else f"class {name}"
    if not issubclass(value, enum.Enum):
        yield f"{name}{_signature(value)}"
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield f"{name}.{field.name}: {_annotation(field.type)}"
    for member, found in sorted(vars(value).items()):
        if not member.startswith("_") and not isinstance(found, types.MemberDescriptorType):
            yield from _member_lines(f"{name}.{member}", found)


def _member_lines(name: str, found: object) -> Iterator[str]:
    if isinstance(found, property):
        yield f"{name} -> {_annotation(inspect.signature(found.fget).return_annotation) if found.fget else '?'}"
    elif isinstance(found, staticmethod | classmethod):
        yield f"{name}{_signature(found.__func__)}  # {type(found).__name__}"
    elif inspect.isfunction(found):
        yield f"{name}{_signature(found)}"
    elif isinstance(found, enum.Enum):
        yield f"{name} = {_shown(found.value)}"
    elif isinstance(found, str | int | float | bool | None):
        yield f"{name} = {_shown(found)}"


def _signature(value: object) -> str:
    assert callable(value)
    signature = inspect.signature(value)
    parts: list[str] = []
    kind = None
    for parameter in signature.parameters.values():
        if kind is parameter.POSITIONAL_ONLY and parameter.kind is not kind:
            parts.append("/")
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL}:
            parts.append("*")
        kind = parameter.kind
        parts.append(_parameter(parameter))
    if kind is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    returns = _annotation(signature.return_annotation)
    return f"({', '.join(parts)})" + (f" -> {returns}" if returns else "")


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotation = _annotation(parameter.annotation)
    text = f"{stars}{parameter.name}" + (f": {annotation}" if annotation else "")
    return text if parameter.default is parameter.empty else f"{text} = {_shown(parameter.default)}"


def _annotation(annotation: object) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _shown(value: object) -> str:
    # An object's address differs from process to process.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


if __name__ == "__main__":
    PINNED.write_text("\n".join(described()) + "\n", encoding="utf-8")
    print(f"wrote {len(described())} lines to {PINNED}")
