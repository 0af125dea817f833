#!/usr/bin/env bash
# Set up .venv from pinned requirements and report what this machine has. A second run downloads nothing again.
#
#     bash scripts/setup.sh                         # what training needs
#     bash scripts/setup.sh requirements-dev.txt    # also tests and linters
#     PYTHON=python3.12 bash scripts/setup.sh
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

requirements="${1:-requirements.txt}"
[[ -f "$requirements" ]] || fail "no file $requirements; there are $(echo requirements*.txt)"
stamp=".venv/$(basename "$requirements" .txt).installed" # holds a checksum once the installation is complete
wanted="$(cat requirements.txt "$requirements" | cksum)"

# open_spiel, torch, numpy and scipy as pinned have no wheels for others.
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

make_venv() {
    local python candidate candidates=(python3 python3.{14,13,12,11})
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if fits "$candidate"; then
            python="$candidate"
            break
        fi
    done
    [[ -n "${python:-}" || -z "${PYTHON:-}" ]] || fail "PYTHON=$PYTHON is no Python from 3.11 to 3.14"
    [[ -n "${python:-}" ]] || fail "no Python from 3.11 to 3.14 found; install one, or name it: PYTHON=/path/to/python3.11 make train"
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || fail "$python cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)"
}

check_disk() {
    local free_gb least_gb="$1"
    free_gb="$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')"
    [[ "$free_gb" -ge "$least_gb" ]] || fail "$free_gb GB free on this disk: .venv takes 2 GB, up to 8 GB with CUDA"
    echo "setup: $free_gb GB free on this disk; .venv takes 2 GB, up to 8 GB with CUDA"
}

advise_cpu() {
    echo "setup: no NVIDIA driver here, and PyPI's torch brings gigabytes of CUDA along; to save them, start again with"
    echo "setup:     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
}

install() {
    # Compiling 19,000 modules takes a minute. Python compiles those that are imported.
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
    local indexes
    indexes="$(.venv/bin/python -m pip config list 2>/dev/null || true)"
    if .venv/bin/python -m pip show --quiet torch 2>/dev/null || [[ "$(uname)" != Linux ]]; then
        check_disk 3
    elif command -v nvidia-smi >/dev/null; then
        check_disk 8
    elif [[ "$indexes" == *index-url* ]]; then # which may have a torch without CUDA
        check_disk 3
    else
        check_disk 8
        advise_cpu
    fi
    # Packages are of no version until all of them are; those of an earlier requirements.txt are being replaced.
    find .venv -maxdepth 1 -name '*.installed' \( -path "$stamp" -o ! -newer requirements.txt \) -delete
    # First and alone: resolved together with the rest, pip may choose and download another build of torch.
    # An old pip takes twice as long for the rest. Where none is newer, it will do.
    "${pip[@]}" --upgrade "pip>=25" || true
    echo "setup: installing torch"
    "${pip[@]}" "$(grep '^torch==' requirements.txt)"
    echo "setup: installing the rest of $requirements"
    "${pip[@]}" -r "$requirements"
    echo "$wanted" >"$stamp"
}

report() {
    .venv/bin/python - <<'EOF'
import sys

try:
    import pyspiel
    import torch
except ImportError as error:
    sys.exit(f"setup: installed, but unusable on this system: {error}")

print(f"setup: Python {sys.version.split()[0]}, torch {torch.__version__}")
print(f"setup: pyspiel works, {len(pyspiel.registered_names())} games")
if torch.cuda.is_available():
    device = torch.cuda.get_device_properties(0)
    print(f"setup: CUDA works: {device.name}, {device.total_memory / 1e9:.0f} GB")
    print("setup: next: make train, or make train CONFIG=config/train_config.json for Qwen3-4B in 4 bits")
else:
    from policy.model import why_no_cuda

    print(f"setup: {why_no_cuda()}" if why_no_cuda() else "setup: no CUDA device")
    print("setup: the tiny model trains on the CPU, the Qwen models need a GPU")
    print("setup: next: make train")
EOF
}

fits .venv/bin/python || make_venv
version() { "$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null; }
[[ -z "${PYTHON:-}" || "$(version "$PYTHON")" == "$(version .venv/bin/python)" ]] ||
    fail "PYTHON=$PYTHON is not the version of the .venv that is there; remove .venv to make it anew"
# A .venv whose creation was interrupted has an interpreter but no pip.
.venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
[[ "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]] || install
touch "$stamp" # make compares its time with that of the requirements
report
