"""The encoder and the decoder, and how they are computed."""

from collections.abc import Iterator

import jax

from jaxthd.config import Config
from jaxthd.config.block import letters_and_titles
from jaxthd.config.findings import Finding, divisors
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.models.adapt import trained
from jaxthd.ops.attention import contract, te
from jaxthd.ops.attention.thd import unfit_shape
from jaxthd.ops.backend import version_numbers
from jaxthd.ops.pallas_launch import CAPABILITY_LEAST
from jaxthd.ops.scan.pallas import why_unfit
from jaxthd.validate.rules import DeviceFacts, shapes_of

# --- the encoder ---


def _encoder(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the front end's settings."""
    encoder = config.model.encoder
    if encoder is not None:
        yield from encoder.faults("model.encoder")


# --- the decoder ---


def _patterns(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the letters of the blocks, multi-token prediction, and the vocabulary."""
    llm = config.model.llm
    letters = (
        f"one letter a block of {', '.join(llm.blocks)} (model.llm.blocks), or of {letters_and_titles()}"
    )
    unknown = sorted(set(llm.letters) - set(llm.blocks))
    if unknown or not llm.letters:
        holds = f"holds {', '.join(unknown)}" if unknown else "is empty"
        yield Finding(
            f"model.llm.pattern {llm.pattern!r} {holds}",
            f"{letters}, and | between pipeline stages",
            "correct model.llm.pattern",
        )
    unknown = sorted(set(llm.mtp_pattern) - set(llm.blocks))
    if unknown:
        yield Finding(
            f"model.llm.mtp_pattern {llm.mtp_pattern!r} holds {', '.join(unknown)}",
            f"{letters}, the blocks of one depth; pipeline stages do not divide it",
            'correct model.llm.mtp_pattern; "*E" is Nemotron-3\'s, "" means none',
        )
    odd = sorted(x for x in llm.blocks if len(x) != 1 or x in "|.=" or x.isspace())
    unused = sorted(set(llm.blocks) - set(llm.kinds) - set(odd))
    if unused:
        yield Finding(
            f"model.llm.blocks has {', '.join(unused)}, which no block of model.llm.pattern is",
            f"settings of the blocks that it has, {', '.join(llm.kinds)}",
            "leave them out, or correct model.llm.pattern",
        )
    if odd:
        yield Finding(
            f"model.llm.blocks has {', '.join(map(repr, odd))}",
            "one letter for each kind of block, or another mark than | . = and space",
            "rename them, in model.llm.pattern too",
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


def _drafting(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that decoding can draft with multi-token prediction, if it should."""
    llm, drafted = config.model.llm, config.compute.num_speculative_tokens
    if not drafted:
        return
    found, change = f"compute.num_speculative_tokens is {drafted}", "set compute.num_speculative_tokens to 0"
    if not llm.mtp_pattern:
        yield Finding(
            f'{found} with model.llm.mtp_pattern ""',
            "0, because the model has no multi-token prediction to draft with",
            f"{change}, or use a model that was trained with it (model.llm.mtp_pattern, train.mtp_loss)",
        )
    if config.mesh.pipeline > 1 or config.rollout_mesh.pipeline > 1:
        expected = "0 with mesh.pipeline above 1: stages that follow each other do not draft"
        yield Finding(found, expected, f"{change}, or mesh.pipeline to 1")
    still = sorted(x for x in llm.kinds if x in llm.blocks and not llm.blocks[x].rolls_back)
    if still:
        names = ", ".join(f"{x} ({llm.blocks[x].title})" for x in still)
        yield Finding(
            f"{found} with blocks {names} of model.llm.blocks",
            "blocks that take several tokens at once and go on after any of them (Block.rolls_back)",
            change,
        )


def _blocks(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the settings of each kind of block, and that they agree."""
    llm = config.model.llm
    for where, block in llm.each_block:
        yield from block.faults(where, llm.dim)
    try:
        _ = llm.window
    except ValueError as error:
        yield Finding(str(error).partition("; ")[0], "one size", "give all blocks with a window the same")
    if sum(block.routes for _, block in llm.each_block) > 1:
        yield Finding(
            f"model.llm.blocks {', '.join(x for x in llm.blocks if llm.blocks[x].routes)} route tokens",
            "one kind of block that does, because its load is told by layer",
            "give all layers with experts one letter",
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
    sizes = [x for x in (block.attention(1) for _, block in llm.each_block) if x]
    heads = (contract.AttentionShape(config.compute.dtype, x.heads, x.kv_heads, x.kernel_dim) for x in sizes)
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
    used = {"attention_backend": sizes, "encoder_attention": config.model.encoder}
    for field in (field for field, is_used in used.items() if is_used and device.platform == "cpu"):
        if getattr(config.compute, field) == "pallas":
            expected = "a GPU, because a CPU interprets these kernels, slowly"
            change = f"set compute.{field} to auto"
            yield Finding(f'compute.{field} is "pallas" on cpu', expected, change, is_warning=True)


def _scan_kernels(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that the scan kernels can run here, and take its shape."""
    sizes = [x for x in (block.scan(1) for _, block in config.model.llm.each_block) if x]
    if config.compute.scan_backend != "pallas" or not sizes:
        return
    found, change = 'compute.scan_backend is "pallas"', "set compute.scan_backend to xla"
    chunk, dtype = config.compute.blocks.scan, config.compute.dtype
    unfit = next(filter(None, (why_unfit(chunk, x.head_dim, x.state, dtype) for x in sizes)), None)
    if unfit:
        expected = "powers of two from 16 up for head_dim and state of model.llm.blocks, and"
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


RULES = (_encoder, _patterns, _drafting, _blocks, _dtype, _attention_kernels, _scan_kernels)
