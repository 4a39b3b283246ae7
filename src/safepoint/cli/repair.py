"""How a repair plan is told: what can be chosen, what is lost of each checkpoint, and what a copy would mend."""

from __future__ import annotations

from safepoint.cli.display import counted, print_line, print_table, print_title, size_text
from safepoint.cli.needs import permits_text
from safepoint.restoring.records import DamagedRecord
from safepoint.restoring.repair import Chance, RepairPlan

_USES = {
    "next": "the next start takes it",
    "fallback": "older and good; restore(step={asked!r}, branch=True)",
    "branch": "good, on a branch that was left; restore(step={asked!r}, branch=True)",
}
_MOST_REASONS_TOLD = 5


def print_repair_plan(plan: RepairPlan) -> None:
    """Print a repair plan."""
    print_title("What can be chosen")
    rows = [[str(entry.step), entry.state, _use(entry), entry.generation] for entry in plan.checkpoints]
    print_table(["step", "state", "use", "generation"], rows, numeric=["step"])
    if plan.resumes_at is None:
        print_line("nothing can be resumed from; a start is refused until a copy is brought back, or restart=True")
    else:
        needs = next((entry.needs for entry in plan.checkpoints if entry.use == "next"), ())
        condition = f" only if its contract permits {permits_text(needs)}" if needs else ""
        cost = f", and repeats {counted(plan.lost_updates, 'update')}" if plan.lost_updates else "; no update is lost"
        print_line(f"a start resumes at step {plan.resumes_at}{condition}{cost}")
    if plan.records:
        print_title("Records that do not hold")
        for record in plan.records:
            print_line(record_text(record))
    if not plan.files:
        return
    print_title("What a copy would mend")
    for file in plan.files:
        size = (
            f"{size_text(file.size_bytes)}, digest {file.digest}" if file.digest else "what it should be is not known"
        )
        print_line(f"{file.generation}/{file.name}: {size}")
        for reason in file.reasons[:_MOST_REASONS_TOLD]:
            print_line(f"  {reason}")
        if len(file.reasons) > _MOST_REASONS_TOLD:
            print_line(f"  and {len(file.reasons) - _MOST_REASONS_TOLD} more; --json tells all")
        others = [name for name in file.needed_by if name != file.generation]
        if others:
            print_line(f"  also needed by {', '.join(others)}")
        for place in file.same_as:
            print_line(f"  the same bytes lie in {place}")


def record_text(record: DamagedRecord) -> str:
    """Return what is told of a small file that does not hold."""
    may_be = " (a crash may leave it so)" if record.is_torn else ""
    return f"{record.file} does not hold: {record.reason}{may_be}; {record.cost}"


def _use(entry: Chance) -> str:
    if entry.use in _USES:
        permits = f", if its contract permits {permits_text(entry.needs)}" if entry.needs else ""
        return f"{_USES[entry.use].format(asked=entry.asked)}{permits}"
    if entry.use == "partly":
        lost, skip = ", ".join(entry.lost_items), ", ".join(f'"{name}"' for name in entry.lost_items)
        return f"lost: {lost}; the rest with restore(step={entry.asked!r}, branch=True, skip=[{skip}])"
    return "marked for deletion" if entry.state == "deleted" else "lost"
