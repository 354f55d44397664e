#!/usr/bin/env bash
# record.sh CHECKOUT OUT : trains each runnable config for a few steps with the code of CHECKOUT; keeps losses and gradient norms
set -u
C=$(realpath $1); OUT=$(realpath -m $2); mkdir -p $OUT; W=$OUT/work; mkdir -p $W
export PYTHONPATH=$C JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-cache}
PY=${PYTHON:-python}; cd $C
common="--train.steps 4 --train.validate-every 2 --train.validation-batches 2 --train.checkpoint-every 2"
run() { n=$1; shift; [ -s $OUT/$n.jsonl ] && return; rm -rf $W/$n; "$@" --workdir $W/$n > $W/$n.log 2>&1 || { echo "$n FAILED: $(tail -3 $W/$n.log)"; return; }; cp $W/$n/metrics.jsonl $OUT/$n.jsonl; echo "$n done"; }
for c in first_run cp2 padded; do run $c $PY -m jaxthd.train --config configs/$c.py $common; done
for f in nemotron_h nemotron3 qwen3 qwen3_moe qwen3_next gpt_oss deepseek_v3 moonlight; do
cat > $W/fam_$f.py <<P
from jaxthd import load_config
import importlib.util
spec = importlib.util.spec_from_file_location("tf", "$C/configs/tiny_families.py"); m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
def config(): return m.config("$f")
P
run fam_$f $PY -m jaxthd.train --config $W/fam_$f.py $common --train.max-new-tokens 4; done
for c in grpo dpo sums; do
cat > $W/$c.py <<P
from dataclasses import replace
from jaxthd import load_config
c0 = load_config("$C/configs/$c.py")
def config(): return replace(c0, train=replace(c0.train, before=(), init_from=("$W/first_run",)))
P
done
if [ ! -s $W/pairs.jsonl ]; then $PY -m jaxthd.preferences $W/first_run --manifest synthetic --out $W/pairs.jsonl --items 60 --max-new-tokens 12 > $W/pairs.log 2>&1; fi
sed -i "s#before=(), #before=(), #; s#return replace(c0, train#return replace(c0, data=replace(c0.data, manifest=(\"$W/pairs.jsonl\",)), train#" $W/dpo.py
run grpo $PY -m jaxthd.grpo --config $W/grpo.py $common
run sums $PY -m jaxthd.grpo --config $W/sums.py $common
run dpo $PY -m jaxthd.train --config $W/dpo.py $common
