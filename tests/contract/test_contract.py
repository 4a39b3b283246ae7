"""A contract refuses what it was not told to accept, and says how to accept it."""

from __future__ import annotations

import pytest

from safepoint.contract import WORDS, Contract, Level, Permit, Promise, Reason, check_contract, lowest, permit
from safepoint.errors import ContractError, RequestError

VERSIONS = Reason("versions", "same_data", "torch", "2.12.0", "2.13.0")
BATCH = Reason("global_batch", "approximate", "global batch", "32", "64")
PACKAGE = Reason("versions", "exact", "safepoint", "0.1.0", "0.2.0")


def promise(*reasons: Reason) -> Promise:
    return Promise(lowest(reason.level for reason in reasons), reasons)


@pytest.mark.parametrize(
    ("level", "reasons", "is_kept"),
    [
        ("exact", (), True),
        ("exact", (PACKAGE,), True),
        ("exact", (VERSIONS,), False),
        ("exact", (BATCH,), False),
        ("same_data", (VERSIONS,), True),
        ("same_data", (BATCH,), False),
        ("approximate", (VERSIONS, BATCH), True),
    ],
)
def test_a_reason_below_the_level_asked_for_refuses(level: Level, reasons: tuple[Reason, ...], is_kept: bool) -> None:
    if is_kept:
        check_contract(Contract(level), promise(*reasons), where="step-7")
        return
    with pytest.raises(ContractError):
        check_contract(Contract(level), promise(*reasons), where="step-7")


def test_a_permitted_word_is_accepted_and_still_lowers_the_promise() -> None:
    kept = promise(VERSIONS, BATCH)
    check_contract(Contract("exact", {"versions", "global_batch"}), kept, where="step-7")
    assert kept.level == "approximate"


def test_a_refusal_lists_every_difference_and_the_words_that_would_permit_them() -> None:
    momentum = Reason("optimizer.momentum", "same_data", "optimizer configuration momentum", "0.9", "0.95")
    with pytest.raises(ContractError) as caught:
        check_contract(Contract("exact", {"versions"}), promise(VERSIONS, BATCH, momentum), where="step-7")
    error = caught.value
    assert [(found.word, found.saved, found.current) for found in error.differences] == [
        ("global_batch", "32", "64"),
        ("optimizer.momentum", "0.9", "0.95"),
    ]
    assert (error.where, error.expected, error.found) == ("step-7", "exact", "approximate")
    text = str(error)
    for part in ("[step-7]", "expected exact", "global batch: saved 32, now 64", "Nothing was changed", "momentum"):
        assert part in text
    assert "Contract(level='exact', permit={'global_batch', 'optimizer.momentum'})" in text
    assert "torch" not in text, "what was permitted is not complained about"


def test_the_remedy_of_a_refusal_accepts_it() -> None:
    with pytest.raises(ContractError) as caught:
        check_contract(Contract(), promise(VERSIONS, BATCH), where="x")
    words = {difference.word for difference in caught.value.differences}
    check_contract(Contract(permit=words), promise(VERSIONS, BATCH), where="x")


@pytest.mark.parametrize("word", [*sorted(WORDS), "model.added", "optimizer.lr", "my.item.shape"])
def test_a_word_of_the_list_or_of_an_item_is_taken(word: str) -> None:
    assert Contract(permit={word}).words == {word}


@pytest.mark.parametrize("word", ["", "everything", "lr", ".", ".lr", "optimizer.", 7, None])
def test_an_unknown_word_is_refused(word: object) -> None:
    with pytest.raises(RequestError, match="unknown word"):
        Contract(permit={word})  # type: ignore[arg-type]


def test_an_unknown_level_and_a_bare_string_are_refused() -> None:
    with pytest.raises(RequestError, match="unknown level"):
        Contract("bitwise")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="set of words"):
        Contract(permit="versions")


def test_a_hyper_parameter_keeps_the_live_value_unless_it_is_said_otherwise() -> None:
    contract = Contract(permit={"optimizer.lr", permit("optimizer.momentum", keep="saved"), "versions"})
    assert contract.words == {"optimizer.lr", "optimizer.momentum", "versions"}
    assert contract.current == {"optimizer.lr"}
    assert Contract(permit=[permit("scheduler", keep="current")]).current == {"scheduler"}


def test_a_permit_keeps_one_of_two_sides() -> None:
    assert permit("optimizer.lr", keep="saved") == Permit("optimizer.lr", "saved")
    with pytest.raises(RequestError, match="two sides"):
        permit("optimizer.lr", keep="both")  # type: ignore[arg-type]


def test_a_reason_says_both_sides_and_what_it_costs() -> None:
    assert str(VERSIONS) == "torch: saved 2.12.0, now 2.13.0 → same_data"
    assert str(PACKAGE) == "safepoint: saved 0.1.0, now 0.2.0"
