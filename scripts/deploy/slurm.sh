#!/bin/bash
# A run under Slurm that queues itself again after its time limit, a preemption or a lost node, until it is done.
#
#   sbatch scripts/deploy/slurm.sh train my.py --data.manifest train.jsonl
#   sbatch --nodes 2 --gpus-per-node 8 --ntasks-per-node 8 scripts/deploy/slurm.sh train my.py --mesh.data 16
#
# What follows the script's name are a command of jaxthd and its options. One task runs for each GPU. All nodes
# see the workdir, the data and the Python environment at the same paths; run it where `jaxthd` is found.
#SBATCH --job-name=jaxthd
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
# 120 s before the time limit every task gets SIGUSR1: more than a step, a validation and a checkpoint take.

srun --kill-on-bad-exit=1 jaxthd "$@"
status=$?
# 75: stopped by a signal before the last step, and saved. The same command continues.
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
