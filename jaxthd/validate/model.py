"""The encoder and the decoder, and how they are computed."""

from collections.abc import Iterator
from operator import attrgetter

import jax

from jaxthd.config import Config
from jaxthd.data.audio.features import mel_filterbank
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.models.adapt import trained
from jaxthd.models.mixers import LAYER_KINDS, letters_and_titles
from jaxthd.ops.attention import contract, te
from jaxthd.ops.attention.thd import unfit_shape
from jaxthd.ops.backend import version_numbers
from jaxthd.ops.pallas_launch import CAPABILITY_LEAST
from jaxthd.ops.rotary import rotated_features
from jaxthd.ops.scan.pallas import why_unfit
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.validate.rules import DeviceFacts, Finding, divisors, multiples, shapes_of

# --- the encoder ---


def _encoder(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks sizes that the encoder divides."""
    encoder = config.model.encoder
    if encoder is None:
        return
    mels, dim, heads, taps = encoder.num_mels, encoder.dim, encoder.heads, encoder.conv_kernel
    try:
        mel_filterbank(mels)
    except ValueError as error:
        yield Finding(str(error), "bands wide enough for the spectrum", "set model.encoder.num_mels to 128")
    if mels % SUBSAMPLING:
        yield Finding(
            f"model.encoder.num_mels is {mels}",
            f"a multiple of {SUBSAMPLING}, because three convolutions halve the bands",
            f"set model.encoder.num_mels to {multiples(mels, SUBSAMPLING)}",
        )
    if dim % 2:
        expected = "an even number, because half of the position encoding are sines, half cosines"
        yield Finding(f"model.encoder.dim is {dim}", expected, f"set model.encoder.dim to {dim + 1}")
    if dim % heads:
        yield Finding(
            f"model.encoder.dim is {dim} with {heads} heads",
            f"a multiple of model.encoder.heads ({heads})",
            f"set model.encoder.dim to {multiples(dim, heads)}, or change model.encoder.heads",
        )
    if taps % 2 == 0:
        expected = "an odd number, because there are as many taps before a frame as after it"
        change = f"set model.encoder.conv_kernel to {taps - 1} or {taps + 1}"
        yield Finding(f"model.encoder.conv_kernel is {taps}", expected, change)


# --- the decoder ---


def _patterns(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the letters of the blocks, multi-token prediction, and the vocabulary."""
    llm = config.model.llm
    unknown = sorted(set(llm.pattern) - {*LAYER_KINDS, "|"})
    if unknown or not llm.letters:
        holds = f"holds {', '.join(unknown)}" if unknown else "is empty"
        yield Finding(
            f"model.llm.pattern {llm.pattern!r} {holds}",
            f"one letter a block of {letters_and_titles()}, and | between pipeline stages",
            "correct model.llm.pattern",
        )
    unknown = sorted(set(llm.mtp_pattern) - set(LAYER_KINDS))
    if unknown:
        yield Finding(
            f"model.llm.mtp_pattern {llm.mtp_pattern!r} holds {', '.join(unknown)}",
            f"one letter a block of {letters_and_titles()}, the blocks of one depth; pipeline stages do not "
            "divide it",
            'correct model.llm.mtp_pattern; "*E" is Nemotron-3\'s, "" means none',
        )
    if llm.mtp_pattern and 2 * llm.dim % config.mesh.tensor:
        yield Finding(
            f"mesh.tensor is {config.mesh.tensor} with model.llm.dim {llm.dim} and model.llm.mtp_pattern",
            f"a divisor of {2 * llm.dim}, because the ranks share a projection of 2 * dim features",
            f"set mesh.tensor to {divisors(2 * llm.dim, config.mesh.tensor)}",
        )
    model = shapes_of(config) if llm.mtp_pattern and not config.train.mtp_loss else None
    if model is not None and any(jax.tree.leaves(trained(model, config.adapt)["mtp"])):
        # Without a gradient, weight decay alone would change its parameters.
        yield Finding(
            f"train.mtp_loss is 0 with model.llm.mtp_pattern {llm.mtp_pattern!r}",
            "more than 0, or its parameters frozen",
            'raise train.mtp_loss, freeze the parameters (adapt.freeze "mtp.*"), or do without multi-token '
            'prediction (model.llm.mtp_pattern "")',
        )
    known = ByteTokenizer.vocab_size if config.data.tokenizer == "bytes" else 0
    needed = known if device.vocabulary is None else device.vocabulary
    if llm.vocab_size < needed:
        yield Finding(
            f"model.llm.vocab_size is {llm.vocab_size}",
            f"{needed} or more, the number of ids of the tokenizer {config.data.tokenizer!r}",
            f"set model.llm.vocab_size to {needed} or more",
        )


def _blocks(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks settings that some kinds of blocks read; without such blocks they do not matter."""
    llm, kinds = config.model.llm, set(config.model.llm.kinds)
    for letters, whole, part, why in (
        ("*W", "q_heads", "kv_heads", "equally many query heads share each key and value head"),
        ("M", "mamba_heads", "mamba_groups", "equally many heads share each group's B, C and norm"),
        ("D", "delta.value_heads", "delta.key_heads", "equally many value heads share each key head"),
    ):
        heads, groups = attrgetter(whole, part)(llm)
        if set(letters) & kinds and heads % groups:
            yield Finding(
                f"model.llm.{whole} is {heads} with {part} {groups}",
                f"a multiple of {groups}, because {why}",
                f"set model.llm.{whole} to {multiples(heads, groups)}, or model.llm.{part} to a divisor",
            )
    low, high = llm.mamba_dt_limit
    if "M" in kinds and not 0 <= low < high:
        expected = "0 <= lower < upper, because they clamp a time step"
        change = "set model.llm.mamba_dt_limit to (0.0, inf), which clamps nothing"
        yield Finding(f"model.llm.mamba_dt_limit is ({low}, {high})", expected, change)
    if {*"-E"} & kinds and llm.ffn_form == "clamped_swiglu" and not llm.swiglu_limit:
        yield Finding(
            'model.llm.swiglu_limit is 0 with model.llm.ffn_form "clamped_swiglu"',
            "more than 0, because gates are clamped to at most this number",
            "set model.llm.swiglu_limit to 7.0, which is GPT-OSS's",
        )
    additions = ("qk_norm", "attention_bias", "attention_gate", "attention_sinks")
    given = [name for name in additions if getattr(llm, name)]
    if given and not {*"*W"} & kinds:
        yield Finding(
            f"model.llm.{' and '.join(given)} with model.llm.pattern {llm.pattern!r}",
            "a block * or W, because no other has these and they have no effect",
            f"leave out {', '.join(given)}, or correct model.llm.pattern",
            is_warning=True,
        )


def _experts(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the routing of experts."""
    llm = config.model.llm
    groups, most = llm.router_groups, llm.router_groups_per_token
    if "E" not in llm.kinds:
        return
    if llm.experts_per_token > llm.experts:
        yield Finding(
            f"model.llm.experts_per_token is {llm.experts_per_token}",
            f"at most the {llm.experts} of model.llm.experts",
            f"set model.llm.experts_per_token to {llm.experts} or less",
        )
    if llm.shared_expert_gate and not llm.shared_expert_dim:
        yield Finding(
            "model.llm.shared_expert_dim is 0 with model.llm.shared_expert_gate True",
            "more than 0, because the gate is the shared expert's",
            "set model.llm.shared_expert_gate to False, or raise model.llm.shared_expert_dim",
        )
    least = -(-llm.experts_per_token * groups // llm.experts)
    if groups > 1 and (llm.experts % groups or llm.experts < 2 * groups):
        yield Finding(
            f"model.llm.router_groups is {groups} with {llm.experts} experts",
            "equal groups of two or more, because a group's score is the sum of its two best experts'",
            f"set model.llm.router_groups to a divisor of {llm.experts} up to {llm.experts // 2}, or to 1",
        )
    elif groups > 1 and not least <= most <= groups:
        yield Finding(
            f"model.llm.router_groups_per_token is {most}",
            f"{least} to {groups}: of the {groups} groups, as many as hold a token's {llm.experts_per_token} "
            "experts",
            f"set model.llm.router_groups_per_token to {max(least, min(most, groups))}",
        )


def _rope(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the rotary embedding."""
    llm, rope, where = config.model.llm, config.model.llm.rope, "model.llm.rope"
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
    features = rotated_features(rope, llm.head_dim)
    if {*"*W"} & set(llm.kinds) and (features % 2 or not 0 < features <= llm.head_dim):
        yield Finding(
            f"{where}.fraction is {rope.fraction}, which is {features} of model.llm.head_dim's features",
            f"an even number from 2 to {llm.head_dim}, because pairs are rotated",
            f"change {where}.fraction or model.llm.head_dim",
        )
    dim = llm.latent_attention.qk_rope_head_dim
    features = rotated_features(rope, dim)
    if "L" in llm.kinds and (features % 2 or not 0 < features <= dim):
        yield Finding(
            f"model.llm.latent_attention.qk_rope_head_dim is {dim}, of which {features} features are rotated",
            f"an even number from 2 to {dim}, because pairs are rotated",
            f"set model.llm.latent_attention.qk_rope_head_dim to {multiples(dim, 2)}, and rotate all of them",
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
    ends = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}
    names = ends.get(rope.scaling, ())
    low, high = [getattr(rope, name) for name in names] or (1.0, 2.0)
    if not 0 < low < high:
        yield Finding(
            f"{where} has {' and '.join(names)} {low} and {high}",
            "the first less than the second and both above 0, because they are the ends of a ramp",
            f"correct {where}",
        )


# --- how it is computed ---


def _dtype(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that the device computes the dtype, and fast."""
    dtype = config.compute.dtype
    if dtype == "float64" and not device.x64:
        change = "set compute.dtype to float32, or JAX_ENABLE_X64=1 in the environment"
        yield Finding("compute.dtype is float64 with jax's 64-bit mode off", "the mode on", change)
    elif dtype == "float64":
        change = "set compute.dtype to float32 or bfloat16, unless this is a test"
        yield Finding("compute.dtype is float64", "a faster one outside tests", change, is_warning=True)
    elif dtype == "bfloat16" and device.platform == "cpu":
        change = "set compute.dtype to float32 on a CPU"
        expected = "float32, because CPUs compute bfloat16 slowly"
        yield Finding("compute.dtype is bfloat16 on cpu", expected, change, is_warning=True)


def _attention_kernels(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """All that depends on versions and on buffers is checked at admission (jaxthd/kernels/choose.py)."""
    backend, capability, llm = config.compute.attention_backend, device.compute_capability, config.model.llm
    found = f'compute.attention_backend is "{backend}"'
    change = "set compute.attention_backend to auto or xla"
    dims = [llm.latent_attention.kernel_head_dim] if "L" in llm.kinds else []
    if not dims or set("*W") & set(llm.kinds):
        dims.append(llm.head_dim)
    heads = (contract.AttentionShape(config.compute.dtype, llm.q_heads, llm.kv_heads, dim) for dim in dims)
    reason = next(filter(None, (unfit_shape(shape, device.platform) for shape in heads)), None)
    if backend in ("te", "cudnn") and reason:
        yield Finding(f"{found}, but {reason}", "a back-end that can run here", change)
    # For padded rows too: the same packed kernel computes them, by their segment ids.
    for wrong, fault in te.BAD.items():
        if backend == "te" and device.platform != "cpu" and capability in (wrong, None):
            yield Finding(
                f"{found} on compute capability {capability or 'unknown'} ({device.kind})",
                f"another GPU, because on {wrong} {fault}",
                change,
                is_warning=capability is None,
            )
    used = {"attention_backend": set("*LW") & set(llm.kinds), "encoder_attention": config.model.encoder}
    for field in (field for field, is_used in used.items() if is_used and device.platform == "cpu"):
        if getattr(config.compute, field) == "pallas":
            expected = "a GPU, because a CPU interprets these kernels, slowly"
            change = f"set compute.{field} to auto"
            yield Finding(f'compute.{field} is "pallas" on cpu', expected, change, is_warning=True)


def _scan_kernels(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that the scan kernels can run here, and take its shape."""
    llm = config.model.llm
    if config.compute.scan_backend != "pallas" or "M" not in llm.kinds:
        return
    found, change = 'compute.scan_backend is "pallas"', "set compute.scan_backend to xla"
    unfit = why_unfit(config.compute.blocks.scan, llm.mamba_head_dim, llm.mamba_state, config.compute.dtype)
    if unfit:
        expected = "powers of two from 16 up for mamba_head_dim and mamba_state, and"
        expected += " compute.dtype float32 or bfloat16"
        yield Finding(f"{found}, but {' and '.join(unfit)}", expected, f"{change}, or change these")
    elif device.platform == "cpu":
        expected = "a GPU, because a CPU interprets these kernels, slowly"
        yield Finding(f"{found} on cpu", expected, change, is_warning=True)
    elif device.platform not in ("gpu", "cuda"):
        yield Finding(f"{found} on {device.platform}", "an NVIDIA GPU", change)
    elif device.compute_capability and version_numbers(device.compute_capability) < CAPABILITY_LEAST:
        where = f"compute capability {device.compute_capability} ({device.kind})"
        least = ".".join(map(str, CAPABILITY_LEAST))
        yield Finding(f"{found} on {where}", f"{least} or more, which has bfloat16 matrix units", change)


RULES = (_encoder, _patterns, _blocks, _experts, _rope, _dtype, _attention_kernels, _scan_kernels)
