"""All settings of a run."""

from dataclasses import dataclass, field, replace

from jaxthd.config.adapt import AdaptConfig
from jaxthd.config.compute import ComputeConfig
from jaxthd.config.data import DataConfig
from jaxthd.config.mesh import MeshConfig
from jaxthd.config.model import ModelConfig
from jaxthd.config.posttraining import PostTrainingConfig, RolloutConfig
from jaxthd.config.train import TrainConfig


@dataclass(frozen=True)
class Config:
    """One run."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    posttraining: PostTrainingConfig = field(default_factory=PostTrainingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def depths_trained(self) -> int:
        """Depths of multi-token prediction that a training step computes."""
        return self.model.llm.mtp_depths if self.model.llm.mtp_pattern and self.train.mtp_loss else 0

    @property
    def depths_drafted_with(self) -> int:
        """Depths of multi-token prediction that decoding computes: 1 where it drafts."""
        return 1 if self.compute.num_speculative_tokens else 0

    @property
    def rollout_mesh(self) -> MeshConfig:
        """The mesh on which answers are drawn."""
        return self.rollout.mesh or self.mesh

    @property
    def updates_of_a_step(self) -> int:
        """Optimizer updates of a training step: more than 1 only for jaxthd grpo."""
        return self.rollout.epochs * self.rollout.updates

    @property
    def without_idle_mtp(self) -> "Config":
        """This config for work that trains nothing: without multi-token prediction, unless decoding drafts
        with it. Its parameters are then not read from a checkpoint."""
        if self.compute.num_speculative_tokens:
            return self
        return replace(self, model=replace(self.model, llm=self.model.llm.without_mtp()))
