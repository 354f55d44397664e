"""Floating-point operations that a training step's documents ask for, whatever computes them."""

from collections.abc import Callable

from jaxthd.config import Config
from jaxthd.data.loader import BatchReport
from jaxthd.planning.parameters import Group, parameter_groups


def model_flops(config: Config) -> Callable[[BatchReport], float]:
    """A function that counts them for the documents of a step: products with weights, forward and backward.

    A weight costs 2 operations a token forward, 2 for the gradient of its input, and 2 more for its own where
    it trains. A part that is frozen as a whole, and has nothing trained before it, has no backward pass.
    Padding, recomputation, attention's scores and Mamba2's scan do not count. Tokens meet the weights of the
    decoder and of the experts that they are routed to; supervised ones meet the head, once for each depth of
    multi-token prediction too; positions of the encoder's layers meet the encoder, its outputs the adapter.
    """
    groups, front_end = parameter_groups(config), config.model.encoder
    met = {"encoder": 0.0, "adapter": 0.0}  # in a second of audio
    if front_end:
        seconds = front_end.seconds(front_end.unit[0])
        met = {"encoder": front_end.positions_per_unit / seconds, "adapter": front_end.unit[1] / seconds}
    parts = {part: [x for x in groups if x.part == part] for part in ("encoder", "adapter", "LLM")}
    depths = config.depths_trained
    times = depths / max(config.model.llm.mtp_modules, 1)  # depths may share their weights
    head = "embedding" if config.model.llm.tied_embedding else "head"
    per_second = per_token = per_target = 0.0
    trains_before = False
    for part in ("encoder", "adapter", "LLM"):
        trains = trains_before or any(group.trained for group in parts[part])
        for group in parts[part]:
            flops = _of_group(group, backward=trains)
            if part != "LLM":
                per_second += flops * met[part]
            elif group.name == head:
                per_target += (1 + depths) * flops
            elif group.name != "embedding":
                per_token += flops * (times if group.name.startswith("MTP") else 1)
        trains_before = trains

    def count(report: BatchReport) -> float:
        """Floating-point operations of a step, from its report."""
        flops = per_second * report.audio_seconds + per_token * report.real_tokens
        return flops + per_target * report.supervised_tokens

    return count


def _of_group(group: Group, *, backward: bool) -> float:
    trained = group.trained / group.parameters
    return group.active * (2 + 2 * backward + 2 * trained * backward)
