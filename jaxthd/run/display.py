"""The metrics of a run as people see them: which, in which words, in which panels."""

from typing import NamedTuple

from jaxthd.objectives.metric import VALIDATION, Curve, Metric, Number, Panel
from jaxthd.objectives.objective import Objective
from jaxthd.run.metrics import PREFERENCE_METRICS, STEP_METRICS, VALIDATION_METRICS


def label(name: str) -> str:
    """Its name for people: "dev WER" of "validation_dev_wer"."""
    words = name.removeprefix(VALIDATION).split("_")
    return " ".join(["WER" if word == "wer" else word for word in words])


class Display(NamedTuple):
    """The metrics of a run as people see them.

    steps: those of a step, the most important first. validation: those of a validation, by their names
    without "validation_" and the name of a set. panels: of curves.png.
    """

    steps: tuple[Metric, ...]
    validation: tuple[Metric, ...]
    panels: tuple[Panel, ...]

    def metric(self, name: str) -> Metric:
        """The metric of a field of a metrics line, of one set's too. One without a description is shown in
        files alone."""
        own = name.removeprefix(VALIDATION)
        if own == name:
            known = [x for x in self.steps if x.name == name]
        else:
            known = [x for x in self.validation if f"_{own}".endswith(f"_{x.name}")]
            known.sort(key=lambda x: -len(x.name))
        return known[0] if known else Metric(own, "", "")

    def text(self, name: str, value: Number) -> str:
        """A value of the field for people, without the field's name."""
        return self.metric(name).text.format(value)


QUALITY = Panel(
    "Validation",
    "share of words, of tokens",
    (
        Curve(f"{VALIDATION}wer", "word error rate"),
        Curve(f"{VALIDATION}accuracy", "accuracy of the next token"),
    ),
    "share",
)
OPTIMIZATION = Panel(
    "Optimization",
    "gradient norm before clipping",
    (Curve("grad_norm"),),
    "from zero",
    "learning rate",
    (Curve("learning_rate", middle="each"),),
)
SPEED = Panel(
    "Speed",
    "real tokens a second",
    (Curve("tokens_per_second", middle="median"),),
    "from zero",
    "padding, share of token slots",
    (Curve("padding_ratio", middle="each"),),
    "share",
)


def display_of(objective: Objective) -> Display:
    """The display of a run on documents."""
    panels = (*objective.panels, QUALITY, OPTIMIZATION, SPEED)
    of_steps = (*objective.metrics, *STEP_METRICS)
    return Display(of_steps, (*PREFERENCE_METRICS, *VALIDATION_METRICS), panels)
