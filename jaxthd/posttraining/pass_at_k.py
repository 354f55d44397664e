"""How often a policy can be right: answers drawn to held-out prompts, compared with the references."""

import numpy as np

from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.inference.rollouts import Rollout, Rollouts
from jaxthd.inference.wer import make_normaliser
from jaxthd.steps.state import TrainState

VALIDATION_STEP = 0
"""The step that validation's draws depend on: the random numbers are the same at every validation."""


class PassAtK:
    """Draws rollout.group_size answers to each of the first rollout.validation_prompts items of the first
    validation set. rollouts: the engine that training draws with, so no program is added.
    """

    def __init__(self, config: Config, data: SpeechData, rollouts: Rollouts) -> None:
        self._rollouts, self._seed = rollouts, config.train.seed
        self._normalise = make_normaliser(config.train.normaliser)
        self._tokenizer = load_tokenizer(config.data.tokenizer)
        self._prompts = data.validation_prompts(config.rollout.validation_prompts)

    def __call__(self, state: TrainState) -> dict[str, float]:
        """validation_pass_at_1: the share of answers that are right, after train.normaliser: the chance of
        one draw. validation_pass_at_k: the share of prompts to which one of the group is right. {} where no
        prompt is wanted.
        """
        if not self._prompts:
            return {}
        documents = [prompt.document for prompt in self._prompts]
        weights = self._rollouts.on_own_mesh(state.params, state.buffers)
        groups = self._rollouts.draw(*weights, documents, seed=self._seed, step=VALIDATION_STEP)
        right = np.array(
            [
                [self._text(answer) == self._normalise(prompt.reference) for answer in answers]
                for prompt, answers in zip(self._prompts, groups, strict=True)
            ]
        )
        return {
            "validation_pass_at_1": float(right.mean()),
            "validation_pass_at_k": float(right.any(axis=1).mean()),
        }

    def _text(self, answer: Rollout) -> str:
        ids = [t for t in answer.tokens.tolist() if t not in self._rollouts.stop_ids]
        return self._normalise(self._tokenizer.decode(ids))
