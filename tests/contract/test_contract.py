"""A contract refuses what it was not told to accept, and says how to accept it."""

from __future__ import annotations

import pytest

from safepoint.contract import WORDS, Contract, Level, Permit, Promise, Reason, lowest, permit
from safepoint.errors import ContractError, RequestError
from safepoint.restoring.refusal import check_contract

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
    assert "Contract(level='exact', permit={'global_batch', 'optimizer.momentum', 'versions'})." in text
    assert "torch" not in text, "what was permitted is not complained about"


def test_the_remedy_of_a_refusal_accepts_it() -> None:
    with pytest.raises(ContractError) as caught:
        check_contract(Contract(), promise(VERSIONS, BATCH), where="x")
    words = {difference.word for difference in caught.value.differences}
    check_contract(Contract(permit=words), promise(VERSIONS, BATCH), where="x")


def test_the_contract_that_is_offered_keeps_what_was_permitted_and_which_side_wins() -> None:
    rate = Reason("optimizer.lr", "same_data", "lr", "0.1", "0.2")
    decay = Reason("optimizer.weight_decay", "same_data", "weight_decay", "0.0", "0.1")
    config = Reason("config", "approximate", "config width", "8", "16")
    asked = Contract("same_data", {"probe", permit("optimizer.lr", keep="saved")}, rng="derive")
    with pytest.raises(ContractError) as caught:
        check_contract(asked, promise(rate, decay, config), where="x")
    assert caught.value.remedy.startswith(
        "Nothing was changed. Undo the change, or accept it with Contract(level='same_data', "
        "permit={'config', permit('optimizer.lr', keep='saved'), 'probe'}, rng='derive')."
    )


def test_nothing_is_to_be_undone_where_the_checkpoint_alone_lowers_the_promise() -> None:
    position = Reason("data_position", "approximate", "8 batches came from a loader that is no item", "", "")
    with pytest.raises(ContractError) as caught:
        check_contract(Contract(), promise(position), where="x")
    accepted = "Contract(level='exact', permit={'data_position'})"
    assert caught.value.remedy == f"Nothing was changed. Accept it with {accepted}."


def test_another_number_of_ranks_is_offered_new_random_streams_where_they_would_do() -> None:
    size = Reason("world_size", "same_data", "world size", "2", "1")
    streams = Reason("rng", "same_data", "global random streams", "of each of 2 ranks", "as each rank set them")
    table = Reason("table.per_rank", "approximate", "item 'table'", "of each of 2 ranks", "left as it is")
    with pytest.raises(ContractError) as caught:
        check_contract(Contract(), promise(size, streams), where="x", derivable={streams}, saved_ranks=2)
    assert caught.value.remedy == (
        "Nothing was changed. Resume on 2 ranks, or accept it with Contract(level='exact', permit={'world_size'}, "
        "rng='derive'), which begins new random streams; permit={'rng'} in place of rng='derive' leaves them as the "
        "program made them."
    )
    with pytest.raises(ContractError) as caught:
        check_contract(Contract("approximate"), promise(size, table), where="x", saved_ranks=1)
    assert caught.value.remedy == (
        "Nothing was changed. Resume on 1 rank, or accept it with "
        "Contract(level='approximate', permit={'table.per_rank'})."
    )


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
