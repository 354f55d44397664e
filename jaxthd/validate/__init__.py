"""What a configuration must satisfy: checked first, before data is read or a weight exists.

`validate` is one pure function of (configuration, facts about the machine). Its rules are small functions of
the two, in a file for each group, with the fields they read; a rule is left out where one of its
fields is faulty in itself (values.py), so that one mistake is reported once.
"""

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.validate import buffers, data, mesh, model, training
from jaxthd.validate.rules import DeviceFacts, Problem
from jaxthd.validate.values import faults

__all__ = ["RULES", "ConfigError", "DeviceFacts", "Problem", "problems", "validate"]

RULES = [*mesh.RULES, *buffers.RULES, *data.RULES, *model.RULES, *training.RULES]


class ConfigError(UserError):
    """A configuration that cannot work. The message lists everything that is wrong with it."""


def validate(config: Config, device: DeviceFacts) -> list[str]:
    """Warnings about a configuration that can work. Raises ConfigError listing every reason why it cannot."""
    found = problems(config, device)
    errors = [str(p) for p in found if not p.is_warning]
    if errors:
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        raise ConfigError(f"the configuration cannot work ({len(errors)} to correct):{lines}")
    return [str(p) for p in found]


def problems(config: Config, device: DeviceFacts) -> list[Problem]:
    """Everything wrong or doubtful about the configuration: faulty values first, then by rule."""
    faulty = faults(config)

    def is_faulty(read: str) -> bool:
        return any(f"{read}.".startswith(f"{bad}.") or bad.startswith(f"{read}.") for bad in faulty)

    sound = [rule for rule in RULES if not any(map(is_faulty, rule.reads))]
    return [*faulty.values(), *(problem for rule in sound for problem in rule.check(config, device))]
