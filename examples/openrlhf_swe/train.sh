#!/bin/bash
# Trains a model by OpenRLHF on the tasks of agent.py: two GPUs for the model, two for rollouts.
# usage: examples/openrlhf_swe/train.sh [MORE FLAGS OF OPENRLHF ...]
set -euo pipefail
cd "$(dirname "$0")"

# OpenRLHF's own openrlhf.cli.train_ppo_ray, with rollout actors that are started again when they die.
python3 -m belayer_integrations.openrlhf.train \
    --actor.model_name_or_path "${MODEL:-Qwen/Qwen3-4B-Instruct-2507}" \
    --train.agent_func_path "$PWD/agent.py" \
    --data.prompt_dataset "$PWD/prompts.jsonl" \
    --data.input_key prompt \
    --data.label_key label \
    --data.apply_chat_template \
    --data.max_len 8192 \
    --rollout.batch_size 16 \
    --rollout.n_samples_per_prompt 8 \
    --rollout.micro_batch_size 2 \
    --rollout.temperature 1.0 \
    --train.batch_size 128 \
    --train.micro_batch_size 1 \
    --train.num_episodes 100 \
    --train.async_enable \
    --train.partial_rollout_enable \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 2 \
    --actor.gradient_checkpointing_enable \
    --vllm.num_engines 2 \
    --vllm.tensor_parallel_size 1 \
    --vllm.sync_backend nccl \
    --vllm.gpu_memory_utilization 0.85 \
    --algo.advantage.estimator reinforce_baseline \
    --algo.advantage.is_correction_level token \
    --algo.kl.init_coef 0 \
    --ds.zero_stage 3 \
    --ds.packing_samples \
    --ckpt.output_dir out \
    "$@"
