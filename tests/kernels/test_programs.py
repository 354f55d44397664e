"""A function's programs are counted, and those that came from the cache on disk apart."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxthd.kernels.programs import Program, ProgramCount, together


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[None]:
    """A cache on disk of its own, which keeps every program."""
    names = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def made() -> Program:
    return Program(jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x)))


@pytest.mark.usefixtures("cache")
def test_programs_that_are_read_from_the_cache_are_not_said_to_be_compiled():
    x, y = jnp.ones((3, 3)), jnp.ones((5, 5))
    first = made()
    assert first.count == (0, 0)
    first(x), first(x)
    assert first.count == (1, 0)
    jax.clear_caches()  # as in another process
    second = made()
    second(x)
    assert second.count == (1, 1)
    second(y)
    assert second.count == (2, 1)
    jax.clear_caches()
    third = made()
    third.compiled(y)
    third(y)
    assert third.count == (1, 1)
    # What other functions read meanwhile is not its own.
    jax.clear_caches()
    other = Program(jax.jit(lambda x: jnp.tan(x)))
    made()(x)
    other(x)
    assert other.count == (1, 0)


def test_what_people_read_of_a_count():
    assert ProgramCount(1, 0).text(" of the step") == "1 program of the step compiled"
    assert ProgramCount(1, 1).text(" of the step") == "1 program of the step read from the cache"
    assert ProgramCount(9, 0).text() == "9 programs compiled"
    assert ProgramCount(9, 1).text() == "9 programs, 1 of them read from the cache"
    assert together([ProgramCount(2, 1), ProgramCount(3, 3)]) == (5, 4)


def test_a_program_is_a_function_of_jit_besides():
    program = made()
    assert program.lower(jnp.ones((2, 2))).as_text()
    assert jax.eval_shape(program, jnp.ones((2, 2))).shape == (2, 2)
    inside = jax.jit(lambda x: program(x) + 1)
    assert inside(jnp.ones((2, 2))).shape == (2, 2)
