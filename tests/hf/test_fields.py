"""Nonsense in a config.json is told of by one check: file, field, what was found and what was expected."""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.fields import FIELDS, check_fields
from jaxthd.hf.registry import FAMILIES as FORMATS
from tests.hf.published import BASE, FAMILIES, write_published

NONSENSE = ("x", "3", "", [1], ["x"], [[]], {"a": 1}, True, 1.5, -1, 0, 1e400, float("nan"))


def paths(fields: Mapping[str, Any], kinds: Mapping[str, Any] = FIELDS) -> Iterator[tuple[str, ...]]:
    """The fields of a config.json that are read."""
    for name in fields.keys() & kinds.keys():
        yield (name,)
        if isinstance(fields[name], dict) and isinstance(kinds[name], dict):
            yield from ((name, *below) for below in paths(fields[name], kinds[name]))


def path_value(fields: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        fields = fields[name]
    return fields


@pytest.mark.parametrize("name", [*FAMILIES, "fastconformer"])
def test_a_value_of_another_kind_is_refused_by_name(name, tmp_path):
    """Every field that is read, with each nonsense: a model, or an error for users; never another one."""
    folder = write_published(name, tmp_path)
    whole = json.loads((folder / "config.json").read_text())
    refused = []
    for path in sorted(paths(whole)):
        for value in NONSENSE:
            fields = copy.deepcopy(whole)
            path_value(fields, path[:-1])[path[-1]] = value
            (folder / "config.json").write_text(json.dumps(fields))
            try:
                open_checkpoint(folder).lora  # noqa: B018
                model_config(folder, model=BASE)
            except UserError as error:
                refused.append((path, value, str(error)))
    assert len(refused) > 5 * len(list(paths(whole)))
    for path, value, message in refused:
        if isinstance(value, list | dict) and not isinstance(path_value(whole, path), list | dict):
            assert f"config.json has {'.'.join(path)} " in message


def test_the_message_names_file_field_value_and_kind(tmp_path):
    folder = write_published("nemotron_omni", tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["hidden_size"] = [64]
    (folder / "config.json").write_text(json.dumps(fields))
    said = r"config\.json has text_config\.hidden_size \[64\]; expected an integer from 1 on: correct it"
    with pytest.raises(UserError, match=said):
        open_checkpoint(folder)


def test_every_field_of_the_tables_is_checked():
    def names(table: Settings) -> Iterator[str]:
        for entry in table.values():
            match entry:
                case str():
                    yield entry
                case Field(theirs):
                    yield theirs

    tables = [x.configure.__closure__[0].cell_contents for x in FORMATS if x.format == "llm"]
    assert tables
    for decoder in tables:
        of_blocks = [block.settings for block in decoder.blocks.values()]
        assert of_blocks
        for table in (decoder.sizes, *of_blocks):
            assert {*names(table)} <= FIELDS.keys(), decoder.title


@pytest.mark.parametrize(
    "fields",
    [
        {"time_step_limit": [0.0, {"__float__": "Infinity"}], "head_dim": None, "rope_theta": 1000000},
        {"num_attention_heads": 32.0, "lora": {"target_modules": "all-linear"}},
        {"encoder": {"feat_in": "${model.preprocessor.features}", "att_context_size": [[-1, -1], [70, 13]]}},
        {"a_field_that_nobody_reads": [[{}]], "vision_config": {"hidden_size": [1, 2]}},
    ],
)
def test_what_published_files_hold_passes(fields):
    check_fields(fields, "config.json")
