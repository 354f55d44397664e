"""The steps that scripts/compile_for_gpu.py compiles."""

from jaxthd.kernels.choose import using, with_admitted
from scripts.check_gpu import base_config
from scripts.compile_for_gpu import AS_ON_A_GPU, LOOPS


def test_loops_are_all_that_a_cpu_has():
    assert set(LOOPS) == set(AS_ON_A_GPU)
    loops = using(base_config(True, kernels=False), **LOOPS)
    lines: list[str] = []
    assert with_admitted(loops, lines.append) == loops
    assert not lines
