"""How much Python does a save cost for each tensor, the first time and again?

Prints JSON. Two states of tiny tensors are saved; the difference of their times, divided by the difference of their
counts, is what one more tensor costs, and holds neither syncs nor bytes worth speaking of. Tensors are parameters and
averages of AdamW.

    python benchmarks/python_per_tensor.py --counts 300 3000 --rounds 7
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, remove, workplace
from harness.managed import Managed
from harness.rounds import Candidate, Series, interleave, timed

ELEMENTS = 16
REPEATS = 3


class Tiny:
    """Hold so many tiny tensors: a third parameters, the others averages."""

    def __init__(self, count: int) -> None:
        self.model = nn.ParameterList(torch.randn(ELEMENTS) for _ in range(count // 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def seconds(self, folder: Path) -> dict[str, float]:
        """Save first and again, with a manager of its own."""
        managed = Managed(folder / "run", {"model": self.model, "optimizer": self.optimizer})
        found = []
        for _ in range(1 + REPEATS):
            self.optimizer.step()
            managed.mark()
            found.append(timed(managed.save)["seconds"])
        managed.close()
        remove(folder / "run")
        return {"first": found[0], "repeated": min(found[1:])}


def answer(asked: Settings, *, counts: tuple[int, int]) -> Answer:
    """Measure both states, and divide."""
    few, many = (3 * (count // 3) for count in counts)
    states = {str(count): Tiny(count) for count in (few, many)}
    with workplace(asked.folder, needed_bytes=64 << 20) as folder:
        measured = [Candidate(name, lambda tiny=tiny: tiny.seconds(folder)) for name, tiny in states.items()]
        series = interleave(measured, rounds=asked.rounds, seconds=asked.seconds, between=come_to_rest)
    targets = [
        Target(
            f"Python per tensor, {word} save",
            "difference of seconds / difference of counts",
            bound,
            False,
            per_tensor(series, quantity, few, many),
            unit="µs",
        )
        for quantity, word, bound in (("first", "first", 40.0), ("repeated", "repeated", 10.0))
    ]
    return Answer({"tensors": [few, many], "elements": ELEMENTS}, series, targets)


def per_tensor(series: Series, quantity: str, few: int, many: int) -> list[float]:
    """Return microseconds for one more tensor, by round."""
    pairs = zip(series.of(quantity, str(many)), series.of(quantity, str(few)), strict=True)
    return [1e6 * (more - less) / (many - few) for more, less in pairs]


if __name__ == "__main__":
    parser = options(__doc__, size="0", rounds=7)
    parser.add_argument("--counts", type=int, nargs=2, default=(300, 3000), help="tensors of the two states")
    parsed = parser.parse_args()
    asked = settings(parsed)
    show(__doc__, asked, answer(asked, counts=tuple(parsed.counts)))
