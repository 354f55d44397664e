"""Writes a NeMo experiment (SALM) as a config file; says where each of its keys went.

    jaxthd import-config salm.yaml --out my.py
    jaxthd import-config salm.yaml trainer.devices=8 data.train_ds.input_cfg.0.cuts_path=cuts.jsonl > my.py

The file is what salm_train.py takes: YAML with model, trainer and data; or the exp_config.yaml of a run of
NeMo's. KEY=VALUE behind it overrides a key, as there. Relative paths in it are of the working directory.
Without --out the config file is printed; where each key went is said on standard error.

Checkpoints that are on this disk already are looked at: what freeze_params and target_modules name is then
compared with their parameters. docs/coming_from_nemo.md has the table of all keys.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxthd.errors import UserError, readable_errors
from jaxthd.files.atomic import write_atomically
from jaxthd.files.paths import home_path
from jaxthd.nemo.config_text import config_text
from jaxthd.nemo.data import translate_data
from jaxthd.nemo.experiment import Experiment
from jaxthd.nemo.model import translate_model
from jaxthd.nemo.training import translate_training
from jaxthd.nemo.translation import Report, Translation, report


def import_config(
    path: Path, overrides: Sequence[str] = (), *, folder: Path | None = None
) -> tuple[str, Report]:
    """(the config file's text, where each key of the experiment went).

    overrides: KEY=VALUE. folder: of the config file, which its relative paths are of; None: the working
    directory. Raises UserError for an experiment that cannot be read or translated.
    """
    experiment = Experiment(path, overrides)
    experiment.require_values()
    found = Translation(experiment, folder or Path.cwd())
    model = translate_model(found)
    translate_data(found)
    translate_training(found)
    return config_text(found, model), report(found)


def main(argv: list[str] | None = None) -> None:
    """The command `jaxthd import-config`."""
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="jaxthd import-config",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("experiment", type=home_path, help="a NeMo experiment (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="other values for its keys")
    parser.add_argument(
        "--out", type=home_path, metavar="FILE", help="the config file; without it, it is printed"
    )
    options = parser.parse_args(argv)
    out: Path | None = options.out
    if out and (out.suffix != ".py" or out.exists()):
        raise UserError(f"--out is {out}; expected a new file whose name ends in .py: choose another name")
    text, found = import_config(
        options.experiment, options.overrides, folder=out.parent.absolute() if out else None
    )
    if out:
        write_atomically(out, text)
    else:
        print(text, end="")
    where = f"\n{out}: jaxthd train {out}" if out else ""
    print(f"{options.experiment}: {found}{where}", file=sys.stderr)


if __name__ == "__main__":
    with readable_errors():
        main()
