"""The bound on a step's time, from a program whose operations, bytes and launches are counted by hand."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
HloModule jit_train_step

%batched (q0: bf16[4,8192,1024], q1: bf16[4,1024,8192]) -> f32[4,8192,8192] {
  %q0 = bf16[4,8192,1024]{2,1,0} parameter(0)
  %q1 = bf16[4,1024,8192]{2,1,0} parameter(1)
  ROOT %dot = f32[4,8192,8192]{2,1,0} dot(%q0, %q1), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

%update (p0: f32[100000,8192], p1: f32[50000,8192], p2: s32[]) -> f32[100000,8192] {
  %p0 = f32[100000,8192]{1,0} parameter(0)
  %p1 = f32[50000,8192]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %old = f32[50000,8192]{1,0} dynamic-slice(%p0, %p2, %zero), dynamic_slice_sizes={50000,8192}
  %sum = f32[50000,8192]{1,0} add(%old, %p1)
  ROOT %set = f32[100000,8192]{1,0} dynamic-update-slice(%p0, %sum, %p2, %zero)
}

%body (x: f32[1000000]) -> f32[1000000] {
  %x = f32[1000000]{0} parameter(0)
  ROOT %copied = f32[1000000]{0} copy(%x)
}

%ends (x: f32[1000000]) -> pred[] {
  %x = f32[1000000]{0} parameter(0)
  ROOT %never = pred[] constant(0)
}

ENTRY %main (a: f32[100000,8192], b: f32[50000,8192], n: s32[], q: bf16[4,8192,1024], k: bf16[4,1024,8192], x: f32[1000000]) -> f32[100000,8192] {
  %a = f32[100000,8192]{1,0} parameter(0)
  %b = f32[50000,8192]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %q = bf16[4,8192,1024]{2,1,0} parameter(3)
  %k = bf16[4,1024,8192]{2,1,0} parameter(4)
  %x = f32[1000000]{0} parameter(5)
  %fused.1 = f32[4,8192,8192]{2,1,0} fusion(%q, %k), kind=kCustom, calls=%batched
  %looped = f32[1000000]{0} while(%x), condition=%ends, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %gathered = f32[100000,8192]{1,0} all-gather(%b), replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %update.1 = f32[100000,8192]{1,0} fusion(%a, %b, %n), kind=kLoop, calls=%update
}
"""  # noqa: E501  XLA's lines
SEQUENCE = """
000: kCommandBuffer [source       | next=003 (1)]
    001: kGemm         [source | sink ]
002: kWhile         [prev=000 (1) | sink]
003: kCustomKernel [prev=002 (1) | sink]
"""
METADATA = 'thunk_metadata {\n  thunk_info {\n    profile_annotation: "fused.1"\n    thunk_id: 1\n  }\n}\n'


def test_a_step_costs_what_its_program_says(tmp_path: Path) -> None:
    endings = {
        "gpu_after_optimizations": PROGRAM,
        "thunk_sequence_after_thunk_passes": SEQUENCE,
        "thunk_metadata": METADATA,
    }
    for ending, text in endings.items():
        (tmp_path / f"module_1.jit_train_step.{ending}.txt").write_text(text)
    command = [sys.executable, "scripts/compile_for_gpu.py", "--read", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kinds = done.stdout.partition("By kind of kernel")[2].partition("Loops")[0]
    rows = {row.split()[0]: row.split()[1:] for row in kinds.splitlines()[2:] if row.strip()}
    # 2 x 4 x 8192 x 8192 x 1024 operations at 989 TFLOP/s; 0.13 GB are read and 1.07 GB written.
    assert rows["product"] == ["1", "0", "549.8", "1.2", "0.6", "0.6"]
    # What is replaced is read and written, what is added is read: 3 x 1.64 GB at 3.35 TB/s.
    assert rows["fusion"] == ["1", "1", "0.0", "4.9", "1.5", "1.5"]
    assert rows["copy"][:2] == ["7", "7"]
    # From the one other rank of its group, at 450 GB/s.
    assert rows["collective"] == ["1", "1", "0.0", "1.6", "3.6", "3.6"]
    assert "a step: 10 kernels, of which the host launches 9; 1 graphs; 7 trips" in done.stdout
    # Kernels 0.556 + 1.467 + 7 x 0.004, the graph 0.008; the exchange takes longer, so it is the bound.
    assert re.search(r"^bound: 4 ms with launches, 4 ms without", done.stdout, re.M)
    assert "in turn with them the step takes 6 ms" in done.stdout
