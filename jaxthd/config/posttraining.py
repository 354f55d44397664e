"""The settings of the reference policy and of rollouts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxthd.config.mesh import MeshConfig
from jaxthd.config.values import DERIVED, Index, Positive, Range


@dataclass(frozen=True)
class PostTrainingConfig:
    """Objectives that compare answers to one prompt: preferences (DPO, KTO) and rewards (GRPO)."""

    share_prompts: Annotated[bool, DERIVED] = True
    """Whether answers to one prompt share its token slots. If not, each has a copy of the prompt; its
    recordings are encoded once in either case. Tests and benchmarks compare the two."""
    reference: Literal["auto", "copy", "cached"] = "auto"
    """Where the reference policy is: "copy": a copy of the first weights in the compute dtype, of what
    trains; "auto": the same, but with LoRA the base weights, if reference_every is 0; "cached": nowhere. It
    scores all training documents before the first step, and WORKDIR/reference.jsonl keeps
    the log-probabilities."""
    reference_every: Index = 0
    """Steps after which the policy becomes the reference; 0: never."""


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of what jaxthd grpo draws, rewards and trains on in each step."""

    mesh: MeshConfig | None = None
    """The mesh on which answers are drawn, over as many devices as `mesh` has; None: that one. The weights
    are copied to it in each step, in the compute dtype. The command line makes one of what it gives, with the
    defaults for the rest."""
    prompts: int = 16
    """Prompts of a step."""
    group_size: Annotated[int, Range(2)] = 8
    """Answers drawn to each prompt."""
    answers_at_once: int = 64
    """Answers that are decoded together, over all data ranks. An ended one makes room for the next group."""
    max_new_tokens: int = 64
    """Most tokens of an answer, its end token included."""
    temperature: float = 1.0
    """Temperature of the softmax that answers are drawn from and whose log-probabilities train."""
    top_k: Index = 0
    """Answers are drawn from the k likeliest tokens; 0: from all."""
    top_p: Annotated[float, Range(0, 1, "(]")] = 1.0
    """Answers are drawn from the likeliest tokens that together have this share of the probability."""
    rewards: tuple[str, ...] = ("wer",)
    """Reward functions, as NAME or NAME=WEIGHT. NAME is "wer", "cer", "insertions", "exact", "format",
    "length", "overlong", "equals", or the dotted path of a Python function: "my_rewards.politeness"."""
    reward_options: tuple[str, ...] = ()
    """Settings of reward functions, as NAME.SETTING=VALUE."""
    reward_folders: Annotated[tuple[str, ...], DERIVED] = ()
    """Folders where the modules of reward functions are looked for, after Python's own path and the working
    directory: that of a config file that names such a function."""
    reward_seconds: Positive = 10.0
    """Longest time that a reward function may take for the answers to one prompt."""
    advantages: Literal["normalised", "centred", "leave_one_out", "leave_one_out_normalised"] = "normalised"
    """The advantage of an answer: its reward less the mean of its group ("centred"), or of the group's other
    answers ("leave_one_out"); normalised ones are divided by the standard deviation of the group."""
    dynamic_sampling: int = 1
    """Most times that a step draws prompts anew in place of groups whose rewards are all equal; such groups
    teach nothing. 1: it draws once, and they stay."""
    epochs: int = 1
    """Number of times that a step trains on the answers it drew."""
    updates: int = 1
    """Updates in each of these, each from the same number of prompts. The number of buffers does not matter:
    an update adds up the gradients of as many as its answers fill."""
    validation_prompts: Index = 0
    """Prompts of the first validation set that are answered and rewarded at each validation: once by the
    likeliest tokens, and by a group of drawn answers, for pass@1 and pass@k (k is group_size). 0: none."""
