"""Requirements of a configuration: checked before data is read or a weight exists.

`validate` is a pure function of a configuration and of facts about the machine. Single values come first
(values.py): each must have its annotated type, and be within its bounds. Where all are, the rules follow, one
for each subject.
"""

from jaxthd.config import Config
from jaxthd.config.findings import Finding
from jaxthd.errors import UserError
from jaxthd.validate import data, mesh, model, posttraining, training
from jaxthd.validate.rules import DeviceFacts, found_by
from jaxthd.validate.values import faulty_values

__all__ = ["RULES", "ConfigError", "DeviceFacts", "Finding", "findings", "validate"]

RULES = (*mesh.RULES, *data.RULES, *model.RULES, *training.RULES, *posttraining.RULES)


class ConfigError(UserError):
    """A configuration that cannot work. The message lists everything that is wrong with it; where single
    values are, these alone."""


def validate(config: Config, device: DeviceFacts) -> list[str]:
    """Warnings about a configuration that can work. Raises ConfigError, with every reason why it cannot."""
    found = findings(config, device)
    errors = [str(finding) for finding in found if not finding.is_warning]
    if errors:
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        then = "; then what settings mean together is checked" if faulty_values(config) else ""
        raise ConfigError(f"the configuration cannot work ({len(errors)} to correct{then}):{lines}")
    return [str(finding) for finding in found]


def findings(config: Config, device: DeviceFacts) -> list[Finding]:
    """Everything wrong or doubtful about the configuration: faulty values; without any, rule by rule."""
    return faulty_values(config) or list(found_by(RULES, config, device))
