"""The share of the training data that a new run holds out for validation, where no validation set was given
and the training data is not built in. The run's config.json keeps it, so that no item changes its side.
"""

import sys
from pathlib import Path

from jaxthd.config import Config
from jaxthd.config.data import HELD_OUT, is_built_in
from jaxthd.config.values import UnsetText, with_value
from jaxthd.data.sources.held_out import held_out_of
from jaxthd.data.sources.registry import training_sources
from jaxthd.errors import UserError
from jaxthd.files.run_folder import holds_a_run, read_config
from jaxthd.objectives.answers import draws_answers
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.steps.forward import objective_of

_NAME = "data.validation_manifest"


def with_held_out(config: Config, workdir: Path) -> Config:
    """The config with a number in data.validation_manifest, where that holds out a share that is not given:
    that of the run in the workdir, or one that is derived from the data now. Validation that was not given
    becomes none where the run never validates, and, with a warning, where nothing can be held out.

    Process 0 derives and prints it; all processes call it.
    """
    if config.data.held_out_share is not None:
        return config
    (found, *_) = exchange((_of_run(config, workdir) or _derived(config)) if is_first() else None)
    return with_value(config, _NAME, found if len(found) > 1 else found[0])


def _of_run(config: Config, workdir: Path) -> list[str] | None:
    """The validation sets of the run in the workdir, if it goes on with them."""
    if not holds_a_run(workdir):
        return None
    stored = read_config(workdir).data
    if _is_unset(config):  # the run may have begun on built-in data
        goes_on = not all(map(is_built_in, stored.manifest))
    else:
        goes_on = bool(stored.held_out_share)
    return _listed(stored.validation_manifest) if goes_on else None


def _derived(config: Config) -> list[str]:
    """The validation sets with a share for the data."""
    if _is_unset(config) and not config.train.validate_every:
        return [""]
    given = [HELD_OUT] if _is_unset(config) else _listed(config.data.validation_manifest)
    try:
        training = training_sources(config.data, prompts=draws_answers(objective_of(config)))
        held_out = held_out_of(training)
        kept = sum(len(source.read(config.data)[0]) for source in training)
        held = len(held_out.read(config.data)[0])
    except (UserError, OSError) as error:  # reading the data raises it again, if need be
        if not _is_unset(config):
            return given
        print(f"warning: this run has no validation: {error}", file=sys.stderr)
        return [""]
    share = f"{HELD_OUT}:{held_out.division.share}"
    print(
        f"{_NAME} {share}: {held:,} of {kept + held:,} items of {held_out.division.title} are held out for "
        f"validation, by their names, and not trained on (--{_NAME.replace('_', '-')} names another data "
        "set, '' none)"
    )
    return [f"{text.removesuffix(HELD_OUT)}{share}" if text.endswith(HELD_OUT) else text for text in given]


def _is_unset(config: Config) -> bool:
    return isinstance(config.data.validation_manifest, UnsetText)


def _listed(manifests: str | tuple[str, ...]) -> list[str]:
    return [manifests] if isinstance(manifests, str) else list(manifests)
