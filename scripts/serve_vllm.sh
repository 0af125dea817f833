#!/usr/bin/env bash
# Start a vLLM server that training plays through (env.use_vllm, docs/scaling.md). vLLM lives in an environment of its
# own, and is not among this project's requirements:
#
#     python3 -m venv .vllm && .vllm/bin/pip install vllm vllm-bnb-plugin
#     PATH="$PWD/.vllm/bin:$PATH" BITS=4 bash scripts/serve_vllm.sh Qwen/Qwen3-4B      port 8000, this machine only
#     PATH="$PWD/.vllm/bin:$PATH" PORT=8001 BITS=4 SHARE=0.5 bash scripts/serve_vllm.sh Qwen/Qwen3-4B
#     .venv/bin/python train_ppo.py --set env.use_vllm=true                            in a second terminal
#
# BITS=4 serves the base in NF4, as model.use_4bit trains it: to the bit with model.use_nested_quant=true. A base served
# in bf16 is another model, and training stops where the two disagree on the answers' log-probabilities by more than
# training/trajectories.py allows. vLLM 0.28 and later need `pip install vllm-bnb-plugin` for NF4. SHARE is the part of
# the card's memory that vLLM takes: 0.9 where it has the card to itself, about 0.5 beside the trainer.
#
# MODEL is that of model.model_name, LORA_RANK at least lora.r (rounded up to a rank that vLLM accepts), MAX_LENGTH at
# least ppo.max_seq_length. Whoever reaches the port can make the server read any folder as an adapter, so it listens on
# the loopback address. With another HOST, set VLLM_API_KEY here and OPENAI_API_KEY to the same for the trainer. Adapters
# are sent as paths: on another machine the run's folder must be mounted under the same path. On CPUs add
# --max-num-batched-tokens N with N at least --max-num-seqs times MAX_LENGTH: there vLLM 0.32 exits when it reads the
# prompt of a seeded request in two parts.
set -euo pipefail

fail() {
    echo "serve_vllm: $*" >&2
    exit 2
}
[[ "${1:--}" != -* ]] || fail "usage: bash scripts/serve_vllm.sh MODEL [more arguments of vllm serve]"
model=$1
command -v vllm >/dev/null || fail "no vllm on the PATH; see the head of $0"
[[ "${BITS:-16}" =~ ^(4|16)$ ]] || fail "BITS=$BITS: expected 4 or 16"
[[ "${LORA_RANK:-16}" =~ ^[1-9][0-9]{0,2}$ ]] && ((${LORA_RANK:-16} <= 512)) || fail "LORA_RANK=$LORA_RANK: expected 1 to 512"

for rank in 8 16 32 64 128 256 320 512; do
    ((rank >= ${LORA_RANK:-16})) && break
done
four_bit=()
[[ "${BITS:-16}" == 4 ]] && four_bit=(--quantization bitsandbytes --load-format bitsandbytes)

# processed_logprobs: after temperature and constraint, as the learner computes them. generation-config vllm: ignore
# top_p, top_k and repetition penalty in the model's folder.
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
exec vllm serve "$model" \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" \
    --enable-lora --max-lora-rank "$rank" --max-loras 2 \
    --gpu-memory-utilization "${SHARE:-0.9}" \
    --max-model-len "${MAX_LENGTH:-4096}" \
    --logprobs-mode processed_logprobs \
    --generation-config vllm \
    --enable-prefix-caching \
    ${four_bit[@]+"${four_bit[@]}"} \
    "${@:2}"
