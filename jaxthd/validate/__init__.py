"""What a configuration must satisfy: checked before data is read or a weight exists.

`validate` is a pure function of a configuration and of facts about the machine. So is each of its rules; they
are grouped by file, and name the fields that they read. A rule is skipped where one of its fields is faulty
in itself (values.py), so that one mistake is reported once.
"""

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.validate import attention, buffers, data, ladder, mesh, model, posttraining, training
from jaxthd.validate.rules import DeviceFacts, Finding
from jaxthd.validate.values import faulty_values

__all__ = ["RULES", "ConfigError", "DeviceFacts", "Finding", "findings", "validate"]

RULES = [
    *mesh.RULES,
    *buffers.RULES,
    *ladder.RULES,
    *data.RULES,
    *model.RULES,
    *attention.RULES,
    *training.RULES,
    *posttraining.RULES,
]


class ConfigError(UserError):
    """A configuration that cannot work. The message lists everything that is wrong with it."""


def validate(config: Config, device: DeviceFacts) -> list[str]:
    """Warnings about a configuration that can work. Raises ConfigError, with every reason why it cannot."""
    found = findings(config, device)
    errors = [str(finding) for finding in found if not finding.is_warning]
    if errors:
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        raise ConfigError(f"the configuration cannot work ({len(errors)} to correct):{lines}")
    return [str(finding) for finding in found]


def findings(config: Config, device: DeviceFacts) -> list[Finding]:
    """Everything wrong or doubtful about the configuration: faulty values first, then rule by rule."""
    faulty = faulty_values(config)

    def is_faulty(read: str) -> bool:
        return any(f"{read}.".startswith(f"{bad}.") or bad.startswith(f"{read}.") for bad in faulty)

    sound = [rule for rule in RULES if not any(map(is_faulty, rule.reads))]
    return [*faulty.values(), *(finding for rule in sound for finding in rule.check(config, device))]
