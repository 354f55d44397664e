"""The settings of optimization, validation and checkpoints."""

from dataclasses import dataclass
from typing import Literal

from jaxthd.config.values import Decay, Index, Positive, Unset
from jaxthd.errors import UserError


@dataclass(frozen=True)
class TrainConfig:
    """Optimization, validation and checkpoints."""

    objective: str = "sft"
    """The objective: "sft" (cross-entropy over the supervised tokens), "dpo" (pairs of a chosen and a
    rejected answer), "kto" (answers that are desired or not), "grpo" (answers drawn from the model, with
    rewards), or the name of an objective that was registered (jaxthd.register_objective)."""
    objective_options: tuple[str, ...] = ()
    """Settings of the objective, as NAME=VALUE."""
    init_from: tuple[str, ...] = ()
    """Weights that a new run starts from: Hugging Face folders, .nemo archives, and workdirs of runs (the
    newest checkpoint, or another with @best or @STEP; its averaged parameters with @ema, @best+ema or
    @STEP+ema). Each source gives what it holds, and a later one replaces what an earlier one gave. The rest
    of the model is randomly initialised."""
    before: tuple[str, ...] = ()
    """Commands of jaxthd that a new run needs to be done, such as "train first_run.py". They are started
    before it in the config file's folder, and should find nothing to do where they were done before."""
    steps: int = 200
    """Optimizer steps of the run."""
    optimizer: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    """The optimizer. "muon" is for weight matrices, with AdamW for the rest."""
    optimizer_options: tuple[str, ...] = ()
    """Settings of the optimizer, as NAME=VALUE."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    """The learning rate after the warm-up: down to min_learning_rate at the last step in a cosine
    or in a line; constant; or constant and down in a line in the last decay_steps."""
    warmup_steps: Index = 20
    """Steps of linear warm-up, before the schedule."""
    decay_steps: int = 20
    """Steps at the end in which "warmup_stable_decay" lowers the learning rate."""
    min_learning_rate: float = 1e-5
    """Learning rate at the last step, but for the schedule "constant"."""
    weight_decay: float = 0.01
    """Decoupled weight decay. It applies to weight matrices, not to biases, norms and per-head scalars."""
    ema_decay: Decay = 0.0
    """Decay of an exponential moving average of the trained parameters, which the run keeps beside them
    (RUN@ema); lower in the first steps. 0: none is kept."""
    validate_ema: bool = False
    """Validate the averaged parameters, in place of those that train."""
    router_bias_rate: float = 1e-3
    """Change of an expert's correction bias in a step: up where the expert gets fewer tokens than the
    average, down where it gets more."""
    aux_loss: float = 0.0
    """Weight of the auxiliary loss that balances the experts' load; 0 for none."""
    mtp_loss: float = 0.1
    """Weight of the loss of multi-token prediction, which is the mean over its depths; 0: it is not
    computed. It is used where model.llm.mtp_pattern is set."""
    ctc_loss: float = 0.0
    """Weight of an auxiliary CTC loss on the encoder; 0: it is not computed. A document needs an encoder
    frame (80 ms) for each supervised token; the metric ctc_uncovered says how many have fewer."""
    ctc_max_labels: int = 128
    """Most supervised tokens of a document that the CTC loss covers. It sizes arrays: tokens of a buffer, and
    documents of a buffer, times this."""
    clip_norm: Positive = 1.0
    """Gradients of a larger global norm are scaled down to this norm."""
    microbatches: int = 1
    """Microbatches into which a step's rows are divided, computed one after the other (gradient
    accumulation)."""
    max_seconds: float = 0.0
    """The command stops after this many seconds, saves, ends with status 75, and may be started again: for
    queues with a time limit. 0: never."""
    seed: Index = 0
    """Seed of the initial parameters."""
    validate_every: Index = 50
    """Steps between validations; 0 for none."""
    validation_batches: int = 8
    """Most batches that a validation reads."""
    max_new_tokens: Index = Unset(160)  # noqa: RUF009 - it cannot be changed
    """Most tokens that validation decodes for a document, to measure the word error rate; 0: it decodes
    none. Not given, it is derived from the longest answer of the validation sets."""
    normaliser: Literal["basic", "english", "whisper", "leaderboard", "none"] = "basic"
    """The normaliser of texts before their words are compared. "basic" and "english" are Whisper's, after
    apostrophes of all kinds are unified: "basic" leaves lower case, no punctuation and nothing in brackets
    (marks that spell vowels stay); "english" also unifies numbers, spellings and contractions. "whisper":
    Whisper's for English as it was published, for comparisons with others' figures. "leaderboard": the Open
    ASR leaderboard's for English, which spells names, fillers and acronyms in one way, and for which a
    compound in two words is no error. "none": what is seen stays; composed forms (NFC), white space and
    invisible characters are unified."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 3
    """Newest checkpoints that are kept, besides the one with the best validation."""
    best_by: Literal["wer", "reward", "preferences"] = "wer"
    """The metric of the best checkpoint: "wer": the lowest validation_wer, or validation_loss where nothing
    is decoded; "reward": the highest validation_reward (jaxthd grpo with rollout.validation_prompts);
    "preferences": the lowest validation_preference_loss (validation sets with preferences)."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Trackers that get the metrics besides metrics.jsonl: "tensorboard" (files in WORKDIR/tensorboard),
    "wandb" (pip install 'jaxthd[wandb]'), "mlflow" (pip install 'jaxthd[mlflow]'). One that fails never stops
    a run."""
    profile: str = ""
    """Steps that are profiled, as FIRST:LAST, such as "10:13"; the trace, in WORKDIR/tensorboard, is opened
    by TensorBoard (pip install tensorboard xprof). "": none. The first step of a command compiles."""

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """First and last step of `profile`. Raises UserError where it is not FIRST:LAST."""
        if not self.profile:
            return None
        first, colon, last = self.profile.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise UserError(
                f"train.profile is {self.profile!r}; expected FIRST:LAST, two steps from 1 on: set it to "
                '"10:13", for example'
            )
        return int(first), int(last)
