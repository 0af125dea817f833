#!/usr/bin/env bash
# Memory, speed and correctness of PPO steps at the true shapes of Qwen2.5-3B and Qwen3-4B, in under nine minutes.
#
#   benchmarks/gpu.sh                a CUDA machine; results in out/gpu, or in the folder OUT names
#   benchmarks/gpu.sh --cpu-smoke    everything once on toy shapes, without a GPU, in two minutes
#
# Nothing is downloaded: weights are random, prompts recorded. Needs torch, transformers, peft, open_spiel, tabulate and
# psutil; 4 bits are skipped without bitsandbytes. Wheels in wheels/ are installed into a temporary folder first, for machines without a network.
# PYTHON chooses the interpreter (else .venv/bin/python, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
out=${OUT:-out/gpu}

if compgen -G 'wheels/*.whl' >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" wheels/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

"$python" -c "import torch, transformers, peft, pyspiel, tabulate, psutil" 2>/dev/null || {
    echo "gpu.sh: torch, transformers, peft, open_spiel, tabulate and psutil are needed; put wheels of what lacks into wheels/" >&2
    exit 2
}

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
timeout 530 "$python" benchmarks/gpu_bench.py --out "$out" --budget 490 "$@"
