"""Facts about the machine, as its system and NVIDIA's driver tell them."""

import os
from pathlib import Path

import pytest

from jaxthd.kernels import machine
from jaxthd.kernels.machine import GPU, host_memory, nvidia_gpus

SMI = """#!/bin/sh
[ "$*" = "--query-gpu=name,memory.total,memory.free,driver_version --format=csv,noheader,nounits" ] || exit 9
{}
"""


def fake_smi(folder: Path, does: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(SMI.format(does))
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (
            "echo 'NVIDIA H100 80GB HBM3, 81559, 81008, 580.159.03'; echo 'NVIDIA L4, 23034, 0, 580.159.03'",
            [
                GPU("NVIDIA H100 80GB HBM3", 81559 << 20, 81008 << 20, "580.159.03"),
                GPU("NVIDIA L4", 23034 << 20, 0, "580.159.03"),
            ],
        ),
        ("echo 'NVIDIA H100 MIG 1g.10gb, [N/A], [N/A], 580.159.03'", []),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", []),
        ("sleep 5", []),
    ],
    ids=["two", "a part", "no driver", "hangs"],
)
def test_gpus_are_those_that_the_driver_lists(
    does: str, expected: list[GPU], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "SMI_SECONDS", 0.5)
    fake_smi(tmp_path, does)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert nvidia_gpus() == expected


def test_without_the_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_gpus() == []


def test_the_host_s_memory_is_at_most_what_the_system_has():
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal"].split()[0]) << 10
    assert 0 < host_memory() <= 1.1 * total
