"""How often each data set of a mixture is drawn from."""

from collections.abc import Sequence

from jaxthd.config import DataConfig


def mixing_weights(data: DataConfig, sizes: Sequence[int]) -> list[float] | None:
    """How often items of each data set are drawn, in proportion; None: as one data set.

    sizes: the numbers of their usable items. The proportions are data.weights, or else the sizes, to the
    power of 1 / data.weights_temperature, and sum to 1 where there is a temperature.
    Source: multilingual mixing by temperature, as in Arivazhagan et al. (2019).
    """
    if len(sizes) == 1:
        return None
    if data.weights_temperature == 1:
        return list(data.weights) or None
    weights = data.weights or tuple(map(float, sizes))
    most = max(weights)
    raised = [(weight / most) ** (1 / data.weights_temperature) for weight in weights]
    return [weight / sum(raised) for weight in raised]
