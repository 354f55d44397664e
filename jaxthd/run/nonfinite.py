"""Steps whose update was skipped, since their loss or gradient was not finite."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxthd.errors import UserError
from jaxthd.run.outputs import OutputFolder

FILE = "not_finite.jsonl"
MOST_STEPS = 10
"""Steps in a row without a finite update that end a run."""
SHOWN = 5
"""Documents of a step that a message names."""


class NonFiniteSteps:
    """Lists them in not_finite.jsonl, warns of each, and ends the run when there are too many in a row.

    last_step: of the restored checkpoint; what the file holds of later steps is of a run that was cut off.
    updates: those of a step. say: prints a line.
    """

    def __init__(
        self, outputs: OutputFolder, last_step: int, updates: int, say: Callable[[str], None]
    ) -> None:
        self._outputs, self._most, self._say = outputs, MOST_STEPS * updates, say
        outputs.keep_lines(FILE, lambda line: line["step"] <= last_step)

    def add(self, line: Mapping[str, Any], documents: Sequence[str], in_a_row: int) -> None:
        """A step whose update was skipped. line: its metrics. documents: their keys. in_a_row: skipped steps
        up to this one.

        Raises UserError where they are those of MOST_STEPS steps.
        """
        entry = {name: line[name] for name in ("step", "loss", "grad_norm")}
        self._outputs.append_line(FILE, entry | {"documents": list(documents)})
        others = f" and {len(documents) - SHOWN} more" if len(documents) > SHOWN else ""
        text = (
            f"step {entry['step']}: loss {entry['loss']}, gradient norm {entry['grad_norm']}: its update is "
            f"skipped. Documents: {', '.join(documents[:SHOWN])}{others}"
        )
        self._say(f"warning: {text}")
        if in_a_row >= self._most:
            raise UserError(
                f"{text}. So were {in_a_row} in a row; expected finite numbers. "
                "Lower train.learning_rate or train.clip_norm, or look at the documents listed in "
                f"{self._outputs / FILE}. The checkpoints are from before these steps"
            )
