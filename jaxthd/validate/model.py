"""The encoder and the decoder, and how they are computed."""

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import jax

from jaxthd.config import Config
from jaxthd.data.audio.features import mel_filterbank
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.models.adapt import trained
from jaxthd.models.mixers import LAYER_KINDS, letters_and_titles
from jaxthd.ops.attention import contract, te
from jaxthd.ops.attention.thd import unfit_shape
from jaxthd.ops.backend import version_numbers
from jaxthd.ops.scan.pallas import CAPABILITY_LEAST, why_unfit
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.validate.rules import DeviceFacts, Finding, Group, divisors, multiples, shapes_of

RULES = Group()


class BadKernel(NamedTuple):
    """A kernel that gave wrong results on an architecture."""

    backend: str
    compute_capability: str
    fault: str


KNOWN_BAD_KERNELS = tuple(BadKernel("te", capability, fault) for capability, fault in te.BAD.items())
"""Using one is an error on that architecture, and a warning on a GPU of unknown architecture."""

# --- the encoder ---


@RULES.rule
def _encoder(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    encoder = config.model.encoder
    if encoder is None and config.model.adapter_dim:
        yield Finding(
            f"model.adapter_dim is {config.model.adapter_dim} with model.encoder None",
            "0, because a model without an encoder has no adapter",
            "set model.adapter_dim to 0, or give the model an encoder",
        )
    if encoder is None:
        return
    mels = encoder.num_mels
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
    dim, heads = encoder.dim, encoder.heads
    if dim % 2:
        expected = "an even number, because half of the position encoding are sines, half cosines"
        yield Finding(f"model.encoder.dim is {dim}", expected, f"set model.encoder.dim to {dim + 1}")
    if dim % heads:
        yield Finding(
            f"model.encoder.dim is {dim} with {heads} heads",
            f"a multiple of model.encoder.heads ({heads})",
            f"set model.encoder.dim to {multiples(dim, heads)}, or change model.encoder.heads",
        )
    taps = encoder.conv_kernel
    if taps % 2 == 0:
        expected = "an odd number, because there are as many taps before a frame as after it"
        change = f"set model.encoder.conv_kernel to {taps - 1} or {taps + 1}"
        yield Finding(f"model.encoder.conv_kernel is {taps}", expected, change)


# --- the decoder ---


@RULES.rule
def _pattern(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    pattern = config.model.llm.pattern
    unknown = sorted(set(pattern) - {*LAYER_KINDS, "|"})
    if unknown or not config.model.llm.letters:
        yield Finding(
            f"model.llm.pattern {pattern!r} " + (f"holds {', '.join(unknown)}" if unknown else "is empty"),
            f"one letter a block of {letters_and_titles()}, and | between pipeline stages",
            "correct model.llm.pattern",
        )


@RULES.rule
def _mtp_pattern(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    unknown = sorted(set(config.model.llm.mtp_pattern) - set(LAYER_KINDS))
    if unknown:
        yield Finding(
            f"model.llm.mtp_pattern {config.model.llm.mtp_pattern!r} holds {', '.join(unknown)}",
            f"one letter a block of {letters_and_titles()}, the blocks of one depth; pipeline stages do not "
            "divide it",
            'correct model.llm.mtp_pattern; "*E" is Nemotron-3\'s, "" means none',
        )


@RULES.rule
def _mtp_over_tensor(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm, ranks = config.model.llm, config.mesh.tensor
    if llm.mtp_pattern and 2 * llm.dim % ranks:
        yield Finding(
            f"mesh.tensor is {ranks} with model.llm.dim {llm.dim} and model.llm.mtp_pattern",
            f"a divisor of {2 * llm.dim}, because the ranks share a projection of 2 * dim features",
            f"set mesh.tensor to {divisors(2 * llm.dim, ranks)}",
        )


@RULES.rule
def _mtp_loss(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Without a gradient, weight decay alone would change its parameters."""
    if not config.model.llm.mtp_pattern or config.train.mtp_loss:
        return
    model = shapes_of(config)
    if model is None:
        return
    if any(jax.tree.leaves(trained(model, config.adapt)["mtp"])):
        yield Finding(
            f"train.mtp_loss is 0 with model.llm.mtp_pattern {config.model.llm.mtp_pattern!r}",
            "more than 0, or its parameters frozen",
            'raise train.mtp_loss, freeze the parameters (adapt.freeze "mtp.*"), or do without multi-token '
            'prediction (model.llm.mtp_pattern "")',
        )


@RULES.rule
def _head_groups(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm = config.model.llm
    for letters, whole, part, why in (
        ("*W", "q_heads", "kv_heads", "equally many query heads share each key and value head"),
        ("M", "mamba_heads", "mamba_groups", "equally many heads share each group's B, C and norm"),
        ("D", "delta.value_heads", "delta.key_heads", "equally many value heads share each key head"),
    ):
        heads, groups = attrgetter(whole, part)(llm)
        if set(letters) & set(llm.kinds) and heads % groups:
            yield Finding(
                f"model.llm.{whole} is {heads} with {part} {groups}",
                f"a multiple of {groups}, because {why}",
                f"set model.llm.{whole} to {multiples(heads, groups)}, or model.llm.{part} to a divisor",
            )


@RULES.rule
def _blocks(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks settings that some kinds of blocks read; without such blocks they do not matter."""
    llm = config.model.llm
    low, high = llm.mamba_dt_limit
    if "M" in llm.kinds and not 0 <= low < high:
        expected = "0 <= lower < upper, because they clamp a time step"
        change = "set model.llm.mamba_dt_limit to (0.0, inf), which clamps nothing"
        yield Finding(f"model.llm.mamba_dt_limit is ({low}, {high})", expected, change)
    if "E" in llm.kinds and llm.experts_per_token > llm.experts:
        yield Finding(
            f"model.llm.experts_per_token is {llm.experts_per_token}",
            f"at most the {llm.experts} of model.llm.experts",
            f"set model.llm.experts_per_token to {llm.experts} or less",
        )
    if "E" in llm.kinds and llm.shared_expert_gate and not llm.shared_expert_dim:
        yield Finding(
            "model.llm.shared_expert_dim is 0 with model.llm.shared_expert_gate True",
            "more than 0, because the gate is the shared expert's",
            "set model.llm.shared_expert_gate to False, or raise model.llm.shared_expert_dim",
        )
    if set("-E") & set(llm.kinds) and llm.ffn_form == "clamped_swiglu" and not llm.swiglu_limit:
        yield Finding(
            'model.llm.swiglu_limit is 0 with model.llm.ffn_form "clamped_swiglu"',
            "more than 0, because gates are clamped to at most this number",
            "set model.llm.swiglu_limit to 7.0, which is GPT-OSS's",
        )


@RULES.rule
def _expert_groups(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm = config.model.llm
    groups, most = llm.router_groups, llm.router_groups_per_token
    if "E" not in llm.kinds or groups == 1:
        return
    if llm.experts % groups or llm.experts < 2 * groups:
        yield Finding(
            f"model.llm.router_groups is {groups} with {llm.experts} experts",
            "equal groups of two or more, because a group's score is the sum of its two best experts'",
            f"set model.llm.router_groups to a divisor of {llm.experts} up to {llm.experts // 2}, or to 1",
        )
    elif not -(-llm.experts_per_token * groups // llm.experts) <= most <= groups:
        least = -(-llm.experts_per_token * groups // llm.experts)
        yield Finding(
            f"model.llm.router_groups_per_token is {most}",
            f"{least} to {groups}: of the {groups} groups, as many as hold a token's {llm.experts_per_token} "
            "experts",
            f"set model.llm.router_groups_per_token to {max(least, min(most, groups))}",
        )


@RULES.rule
def _vocabulary(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    known = ByteTokenizer.vocab_size if config.data.tokenizer == "bytes" else None
    needed = device.vocabulary if device.vocabulary is not None else known
    if needed is not None and config.model.llm.vocab_size < needed:
        yield Finding(
            f"model.llm.vocab_size is {config.model.llm.vocab_size}",
            f"{needed} or more, the number of ids of the tokenizer {config.data.tokenizer!r}",
            f"set model.llm.vocab_size to {needed} or more",
        )


# --- how it is computed ---


@RULES.rule
def _dtype(config: Config, device: DeviceFacts) -> Iterator[Finding]:
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


@RULES.rule
def _fused_attention(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """All that depends on versions and on buffers is checked at admission (jaxthd/kernels/choose.py)."""
    backend, llm = config.compute.attention_backend, config.model.llm
    dims = [llm.latent_attention.kernel_head_dim] if "L" in llm.kinds else []
    if not dims or set("*W") & set(llm.kinds):
        dims.append(llm.head_dim)
    heads = (contract.AttentionShape(config.compute.dtype, llm.q_heads, llm.kv_heads, dim) for dim in dims)
    reason = next(filter(None, (unfit_shape(shape, device.platform) for shape in heads)), None)
    if backend in ("te", "cudnn") and reason:
        change = "set compute.attention_backend to auto or xla"
        yield Finding(
            f'compute.attention_backend is "{backend}", but {reason}', "a back-end that can run here", change
        )


@RULES.rule
def _known_bad_kernels(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """For padded rows too: the same packed kernel computes them, by their segment ids."""
    backend, capability = config.compute.attention_backend, device.compute_capability
    for bad in KNOWN_BAD_KERNELS:
        if (
            backend == bad.backend
            and device.platform != "cpu"
            and capability in (bad.compute_capability, None)
        ):
            where = f"compute capability {capability or 'unknown'} ({device.kind})"
            yield Finding(
                f'compute.attention_backend is "{backend}" on {where}',
                f"another GPU, because on {bad.compute_capability} {bad.fault}",
                "set compute.attention_backend to auto or xla",
                is_warning=capability is None,
            )


@RULES.rule
def _interpreted_attention(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    used = {
        "attention_backend": set("*LW") & set(config.model.llm.kinds),
        "encoder_attention": config.model.encoder,
    }
    for field in (field for field, is_used in used.items() if is_used and device.platform == "cpu"):
        if getattr(config.compute, field) == "pallas":
            expected = "a GPU, because a CPU interprets these kernels, slowly"
            change = f"set compute.{field} to auto"
            yield Finding(f'compute.{field} is "pallas" on cpu', expected, change, is_warning=True)


@RULES.rule
def _scan_kernels(config: Config, device: DeviceFacts) -> Iterator[Finding]:
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
