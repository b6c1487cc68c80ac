#!/bin/bash
# A training under Slurm that goes on where it was when its time is over: `sbatch slurm.sh`, from this folder.
#
# 90 seconds before the end, Slurm sends SIGUSR1. Lightning saves hpc_ckpt_1.ckpt in its default_root_dir and asks Slurm to start the
# job again ("requeue"), which keeps the job's number. The next start finds the file there and goes on in the middle of the epoch:
# with echoing, too, its batches and weights are those of a run that nobody has interrupted.
# Give each job a folder of its own, as here: a new job in the same folder would go on from the old one's file. Under Slurm the log
# folder is named after the job, so that a LightningCLI program needs save_config_kwargs={"overwrite": True}, as plain_cli.py has it.

#SBATCH --job-name=waves
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=3
#SBATCH --time=00:30:00
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append

# With GPUs: --gpus-per-node, as many --ntasks-per-node, and below --trainer.devices; see docs/nodes.md for several nodes.
srun python plain_cli.py fit --config plain_cli_callback.yaml --trainer.default_root_dir "runs/$SLURM_JOB_ID" "$@"
