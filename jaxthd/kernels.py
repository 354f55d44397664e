"""Which kernels a run uses: those that are admitted on the devices of all its processes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxthd.config import Config
from jaxthd.distributed import exchange
from jaxthd.errors import UserError
from jaxthd.ops.attention.admission import Verdict, admit
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import Problem
from jaxthd.ops.attention.machine import Machine


def attention_problem(config: Config) -> Problem:
    """The decoder's attention on each tensor rank."""
    llm, tensor = config.model.llm, config.mesh.tensor
    return Problem(config.model.dtype, llm.q_heads // tensor, max(1, llm.kv_heads // tensor), llm.head_dim)


def with_admitted(config: Config, say: Callable[[str], None], folder: Path | None = None) -> Config:
    """The config with the attention back-end that the run may use. Of several processes all call it.

    "auto" becomes the first of BACKENDS that every process admits, and one line says why the others are not
    used. say: prints a line. folder: see admit. Raises UserError where the one that was asked for is not
    admitted, unless model.attention_unverified is set and it can run here.
    """
    asked = config.model.attention_backend
    if asked == "xla":
        return config
    problem, machine = attention_problem(config), Machine.of_this()
    if asked == "auto":
        refused, chosen = [], "xla"
        for name in (name for name in BACKENDS if name != "xla"):
            refusal = _refusal(admit(BACKENDS[name], problem, machine, folder))
            if refusal is None:
                chosen = name
                break
            refused.append(f"not {name}: {refusal}")
        say(f"attention: {'; '.join([chosen, *refused])}")
        return using(config, chosen)
    verdict = admit(BACKENDS[asked], problem, machine, folder)
    refusal = _refusal(verdict)
    if refusal is None:
        return config
    found = f'model.attention_backend is "{asked}", but {refusal} ({problem}, {machine.kind})'
    fits = all(exchange(verdict.fits))
    if fits and config.model.attention_unverified:
        say(f"warning: {found}; it is used all the same, as model.attention_unverified says")
        return config
    change = "set model.attention_backend to auto or xla"
    more = ", or model.attention_unverified to use it all the same" * fits
    raise UserError(f"{found}; expected a back-end that computes attention right here: {change}{more}")


def using(config: Config, backend: Any) -> Config:
    """The config with that attention back-end."""
    return replace(config, model=replace(config.model, attention_backend=backend))


def _refusal(verdict: Verdict) -> str | None:
    """Of the first process that refuses."""
    return next((refusal for refusal in exchange(verdict.refusal) if refusal is not None), None)
