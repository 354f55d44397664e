"""Freed memory that the C library keeps."""

import subprocess
import sys

CODE = """
import resource, threading
from jaxthd.run.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        b"x" * (40 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def in_a_thread(found):
    thread = threading.Thread(target=lambda: found.append(faults()))
    thread.start()
    thread.join()
    return found[0]

given_back = faults()
assert keep_freed_memory() == (given_back > 0)
faults()
print(given_back, faults(), in_a_thread([]))
"""


def test_arrays_that_are_made_again_cause_no_page_faults():
    """In a process of its own, whose C library it changes. The thread's first array is new to it."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    given_back, kept, in_thread = map(int, done.stdout.split())
    pages = (40 << 20) // 4096
    assert given_back >= 5 * pages / 512, "this C library keeps freed memory by itself"
    assert kept < given_back / 10
    assert in_thread < given_back / 2


PROGRAM = """
import resource
import jax, jax.numpy as jnp
from jaxthd.run.host_memory import keep_freed_memory
from jaxthd.run.startup import simulate_devices

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    plus_one(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

simulate_devices(1)
keep_freed_memory()
x = jnp.zeros((25 << 20,), jnp.float32)
plus_one = jax.jit(lambda x: x + 1)
print(min(faults() for _ in range(15)))
"""


def test_memory_of_a_program_on_one_cpu_device_is_kept_whatever_its_size():
    """Of a result of 100 MiB. Some calls find new memory, while an earlier result is not freed yet."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < (100 << 20) // 4096 / 10
