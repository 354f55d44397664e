"""The pipeline's schedule, and its bubble: the share of a step in which ranks are idle."""

from jaxthd.steps.blueprint import Blueprint


def bubble_formula(ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """The bubble if every stage's forward and backward pass take the same time on all ranks.

    Source: Narayanan et al., 2021, whose formula gives idle time over busy time instead.
    """
    return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)


def describe_bubble(blueprint: Blueprint) -> str:
    """The schedule, its bubble, and the blocks of each stage, as text."""
    schedule, patterns = blueprint.schedule, blueprint.stages.patterns
    p, v, m = schedule.ranks, schedule.chunks, schedule.microbatches
    lines = [
        f"Pipeline: P = {p} ranks, V = {v} stages a rank, M = {m} microbatches. {schedule.ticks} ticks; "
        f"{schedule.slots} inputs kept.",
        f"Bubble: {schedule.bubble:.1%} of the step; (P - 1) / (V M + P - 1) = "
        f"{bubble_formula(p, v, m):.1%}.",
    ]
    return "\n".join([*lines, f"Stages: {' | '.join(patterns)}"] if p * v > 1 else lines)
