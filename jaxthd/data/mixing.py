"""Shares by which each data set of a mixture is drawn from."""

import math
from collections.abc import Sequence

from jaxthd.config import DataConfig
from jaxthd.errors import UserError


def wrong_weights(weights: Sequence[float], sets: int) -> tuple[str, str, str] | None:
    """Returns what was found, what was expected and what to change where these weights cannot mix so many
    data sets; None where they can, or where there are none.
    """
    if len(weights) and len(weights) != sets:
        found = f"data.weights has {len(weights)} numbers for {sets} manifests"
        return found, "one for each manifest, or none", "correct data.weights"
    if not all(0 < weight < math.inf for weight in weights):
        change = "take a manifest that is not to be read out of data.manifest"
        return f"data.weights is {tuple(weights)}", "finite numbers above 0", change
    return None


def require_weights(weights: Sequence[float], sets: int) -> None:
    """Raises UserError where `wrong_weights` says why."""
    if wrong := wrong_weights(weights, sets):
        raise UserError("{}; expected {}: {}".format(*wrong))


def mixing_weights(data: DataConfig, sizes: Sequence[int]) -> list[float] | None:
    """Weights by which items of each data set are drawn; None: as one data set.

    sizes: the numbers of their usable items. The proportions are data.weights, or else the sizes, to the
    power of 1 / data.weights_temperature, and sum to 1 where there is a temperature.
    Source: multilingual mixing by temperature, as in Arivazhagan et al. (2019).
    Raises UserError for weights or a temperature that cannot mix them.
    """
    require_weights(data.weights, len(sizes))
    if not 0.1 <= data.weights_temperature < math.inf:
        raise UserError(
            f"data.weights_temperature is {data.weights_temperature:g}; expected 0.1 or more, and finite: "
            "set it to 1, which keeps the weights"
        )
    if len(sizes) == 1:
        return None
    if data.weights_temperature == 1:
        return list(data.weights) or None
    weights = data.weights or tuple(map(float, sizes))
    most = max(weights)
    if not most:
        return None  # no set has an item
    raised = [(weight / most) ** (1 / data.weights_temperature) for weight in weights]
    return [weight / sum(raised) for weight in raised]
