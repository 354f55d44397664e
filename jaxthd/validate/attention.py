"""The decoder's attention: its rotary embedding, and the parts that not every kind of attention has."""

from collections.abc import Iterator

from jaxthd.config import Config
from jaxthd.ops.rotary import rotated_features
from jaxthd.validate.rules import DeviceFacts, Finding, Group, multiples

RULES = Group()


@RULES.rule
def _rope(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    rope, where = config.model.llm.rope, "model.llm.rope"
    if not rope.theta and rope.scaling != "none":
        yield Finding(
            f"model.llm.rope.scaling is {rope.scaling!r} with theta 0",
            "a theta, because without one nothing is rotated and the scaling has no effect",
            "give model.llm.rope.theta as config.json has it (rope_theta), or no model.llm.rope.scaling",
            is_warning=True,
        )
    if not rope.theta:
        return
    # Multi-head latent attention rotates features of its own.
    if set("*W") & set(config.model.llm.kinds):
        features = rotated_features(rope, config.model.llm.head_dim)
        if features % 2 or not 0 < features <= config.model.llm.head_dim:
            yield Finding(
                f"{where}.fraction is {rope.fraction}, which is {features} of model.llm.head_dim's features",
                f"an even number from 2 to {config.model.llm.head_dim}, because pairs are rotated",
                f"change {where}.fraction or model.llm.head_dim",
            )
    if rope.theta <= 1 or rope.factor < 1:
        yield Finding(
            f"{where}.theta is {rope.theta} and factor {rope.factor}",
            "theta above 1 (or 0 for no rotary embedding) and factor 1 or more",
            f"correct {where}.theta and {where}.factor",
        )
    if rope.scaling in ("yarn", "llama3") and rope.original_positions <= 0:
        yield Finding(
            f"{where}.original_positions is {rope.original_positions} with scaling {rope.scaling!r}",
            "more than 0, the positions of the pre-training",
            f"set {where}.original_positions as config.json has it (original_max_position_embeddings)",
        )
    low, high, names = {
        "yarn": (rope.beta_slow, rope.beta_fast, "beta_slow and beta_fast"),
        "llama3": (rope.low_freq_factor, rope.high_freq_factor, "low_freq_factor and high_freq_factor"),
    }.get(rope.scaling, (1.0, 2.0, ""))
    if not 0 < low < high:
        yield Finding(
            f"{where} has {names} {low} and {high}",
            "the first less than the second and both above 0, because they are the ends of a ramp",
            f"correct {where}",
        )


@RULES.rule
def _rotated_features(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm, dim = config.model.llm, config.model.llm.latent_attention.qk_rope_head_dim
    features = rotated_features(llm.rope, dim)
    if "L" in llm.kinds and llm.rope.theta and (features % 2 or not 0 < features <= dim):
        yield Finding(
            f"model.llm.latent_attention.qk_rope_head_dim is {dim}, of which {features} features are rotated",
            f"an even number from 2 to {dim}, because pairs are rotated",
            f"set model.llm.latent_attention.qk_rope_head_dim to {multiples(dim, 2)}, and rotate all of them",
        )


@RULES.rule
def _additions(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm = config.model.llm
    additions = ("qk_norm", "attention_bias", "attention_gate", "attention_sinks")
    given = [name for name in additions if getattr(llm, name)]
    if given and not set("*W") & set(llm.kinds):
        yield Finding(
            f"model.llm.{' and '.join(given)} with model.llm.pattern {llm.pattern!r}",
            "a block * or W, because no other has these and they have no effect",
            f"leave out {', '.join(given)}, or correct model.llm.pattern",
            is_warning=True,
        )
