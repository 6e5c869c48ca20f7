#!/usr/bin/env bash
# One command from a fresh machine (Linux, macOS or WSL) to a BLEU card, another
# to the tests. The second time it is quick.
#
#   bash run.sh                      install, train, evaluate
#                                    (data: /opt/minidataset, else sample/)
#   bash run.sh -- --max_minutes 20  the same; words after -- go to train.py
#   bash run.sh test                 install and run the tests; words after --
#                                    go to pytest
#   bash run.sh lenet|wikitext|attention|pipeline|collectives|gpt
#                                    another lab; words after -- are its flags
#   bash run.sh gpu                  on a GPU: are the results right, and how
#                                    fast are they; writes a file to send back
#   bash run.sh --help               this text; -- --help: the flags of train.py
#
#   VENV=/path bash run.sh           keep the virtual environment there
#                                    (default: .venv here)
#   PROCESSES=4 bash run.sh gpt      processes of gpt (default: 1) or pipeline
#                                    (default: 2)
#   TORCH_INDEX_URL=URL bash run.sh  take PyTorch from this index
#                                    (default: see choose_index)
#
# It works from any directory: paths are relative to that directory, and runs/
# is made there.
set -euo pipefail

case "${1:-}" in --help | -h | help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac

# The folder of this file, also where it was started through a link.
file="${BASH_SOURCE[0]}"
while [ -L "$file" ]; do
    target="$(readlink "$file")"
    case "$target" in /*) file="$target" ;; *) file="$(dirname "$file")/$target" ;; esac
done
root="$(CDPATH= cd "$(dirname "$file")" && pwd)"
case "${1:-}" in "" | -*) verb=train ;; *) verb="$1"; shift ;; esac # bash run.sh --max_minutes 20
if [ "${1:-}" = "--" ]; then shift; fi
labs="lenet wikitext attention pipeline collectives gpt"
case " train test gpu $labs " in *" $verb "*) ;; *)
    echo "error: unknown verb '$verb'; use: bash run.sh [test|gpu|${labs// /|}] [-- FLAGS]" >&2; exit 2 ;;
esac
case "$(uname -s)" in Linux | Darwin) ;; *)
    echo "error: this needs Linux, macOS or WSL (the Linux inside Windows: https://aka.ms/wsl)" >&2; exit 2 ;;
esac

export PYTHONUNBUFFERED=1
# Waiting threads sleep instead of spinning: on a shared machine spinning makes everything slower
# by a multiple. On Linux engine/ sets this.
[ "$(uname -s)" != Darwin ] || export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
venv="${VENV:-$root/.venv}"
[ "${venv#/}" != "$venv" ] || venv="$PWD/$venv"
python="$venv/bin/python"

# run COMMAND: run it as a child that gets our signals. After a signal nothing else is started.
signal= child=
stop() {
    signal=$1
    [ -n "$child" ] || exit $((128 + $(kill -l "$signal")))
    kill -TERM "$child" 2>/dev/null || true
}
for name in INT TERM HUP; do trap "stop $name" "$name"; done
run() {
    local code
    child=starting
    "$@" <&0 & child=$!
    [ -z "$signal" ] || stop "$signal"
    while true; do # a signal ends the waiting, while the child may still have to save
        wait "$child" && code=0 || code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    child=
    [ -z "$signal" ] || stop "$signal"
    return "$code"
}

# installed FILE: was this file installed before, under the same constraints?
installed() {
    [ -x "$python" ] && cat "$1" "$root/constraints.txt" | cmp -s - "$venv/.installed-$(basename "$1")"
}

# choose_index: sets `index` to where the PyTorch build for this machine is; empty: pip's default.
#
# PyTorch 2.13 has builds for CUDA 13.0 (on PyPI, so the default) and for CUDA 12.6 (cu126); there
# is a third for 13.2 (experimental). Checked in pytorch/pytorch, RELEASE.md for 2.13, in 2026:
#   CUDA 13.0   driver 580 or later   compute capability 7.5 (2080 Ti) to 12.0
#   CUDA 12.6   driver 525 or later   compute capability 5.0 (and V100, 7.0) to 9.0 (H100)
pytorch=https://download.pytorch.org/whl
choose_index() {
    local fields=driver_version,compute_cap gpus driver capability oldest=999 newest=0
    index="${TORCH_INDEX_URL:-}"
    [ -z "$index" ] && [ "$(uname -s)" = Linux ] || return 0
    # One line for each GPU: "535.183.01, 8.0". Old drivers do not know compute_cap.
    gpus="$(nvidia-smi --query-gpu=$fields --format=csv,noheader 2>/dev/null)" ||
        gpus="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null)" || gpus=
    if ! [[ "$gpus" =~ ^[0-9]+[.] ]]; then
        index=$pytorch/cpu
        return
    fi
    while IFS=' ,' read -r driver capability; do
        [[ "$capability" =~ ^[0-9]+[.][0-9]$ ]] || capability=8.0
        capability="${capability/./}"
        ((capability >= oldest)) || oldest=$capability
        ((capability <= newest)) || newest=$capability
    done <<<"$gpus"
    driver="${gpus%%.*}"
    if ((driver < 525 || (newest > 90 && driver < 580))); then
        echo "error: the NVIDIA driver $driver is too old for PyTorch; update it to 580 or later, or" \
            "train on the CPU: TORCH_INDEX_URL=$pytorch/cpu bash $(printf %q "$0") -- --device cpu" >&2
        exit 2
    elif ((driver < 580 || oldest < 75)); then
        index=$pytorch/cu126
    fi
}

# install_torch: the PyTorch build that choose_index finds, unless PyTorch is installed already.
install_torch() {
    local torch pip=("$python" -m pip install --disable-pip-version-check)
    torch="$(grep '^torch==' "$root/requirements.txt")"
    local is_there='import importlib.metadata as m, sys
sys.exit(sys.argv[1] != "torch==" + m.version("torch").split("+")[0])'
    ! "$python" -c "$is_there" "$torch" 2>/dev/null || return 0
    choose_index
    if [ -n "${TORCH_INDEX_URL:-}" ] || [ "$index" = $pytorch/cu126 ]; then
        echo "PyTorch comes from $index"
        run "${pip[@]}" --index-url "$index" "$torch"
    elif [ "$index" = $pytorch/cpu ]; then
        echo "No NVIDIA GPU is found, so PyTorch's build for CPUs is enough, a part of the 2.7 GB with"
        echo "CUDA. If your jobs run elsewhere, on a GPU, stop with Ctrl-C and type"
        echo "    TORCH_INDEX_URL=https://pypi.org/simple bash $(printf %q "$0")"
        run "${pip[@]}" --retries 1 --index-url "$index" "$torch" ||
            echo "note: $index cannot be used; pip's default index has PyTorch with CUDA (2.7 GB)"
    fi # otherwise pip's default is right
}

# install FILE: install its packages in the versions of constraints.txt, unless that was done before.
install() {
    ! installed "$1" || return 0
    local reason own="set VENV to a folder of your own"
    if ! reason="$( (mkdir -p "$venv" && : >>"$venv/.lock") 2>&1)"; then
        [ -z "${VENV:-}" ] || own="type \`unset VENV\` for an environment of your own"
        echo "error: $(basename "$1") is not installed in $venv, which you cannot write to" \
            "(${reason##*: }); ask its owner to type \`VENV=$(printf %q "$venv") bash run.sh test\`" \
            "once, or $own" >&2
        exit 2
    fi
    exec 9>>"$venv/.lock" # two at once would overwrite each other's files
    if command -v flock >/dev/null && ! flock -n 9; then
        echo "another run.sh installs into $venv; waiting for it"
        flock 9 || true
    fi
    if installed "$1"; then exec 9>&-; return; fi
    # No environment, or one whose creation was interrupted?
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
            # The versions that PyTorch has packages for. On Debian and Ubuntu ensurepip is missing
            # until python3-venv is installed.
            "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null && break
            candidate=
        done
        if [ -z "$candidate" ]; then
            echo "error: this needs Python 3.10 to 3.14 with venv (apt install python3-venv, or conda)" >&2
            exit 2
        fi
        echo "making a virtual environment in $venv"
        run "$candidate" -m venv "$venv"
    fi
    echo "installing $(basename "$1") into $venv; this happens once"
    install_torch
    run "$python" -m pip install --disable-pip-version-check -c "$root/constraints.txt" -r "$1"
    cat "$1" "$root/constraints.txt" > "$venv/.installed-$(basename "$1")"
    exec 9>&-
}

install "$root/requirements.txt"
if [ "$verb" = test ]; then
    install "$root/requirements-dev.txt"
    cd "$root"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
    export PYTHONUTF8=1 # what tests read is UTF-8, whatever the terminal's encoding
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # every core is busy with a file of tests
    exec "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for the labs, which are modules
[ "$verb" != gpu ] || install "$root/requirements-dev.txt" # its first stage is a test
torchrun=("$python" -m torch.distributed.run --nproc_per_node)
case "$verb" in
    pipeline)
        [ "${PROCESSES:-2}" = 1 ] && exec "$python" -m labs.pipeline "$@"
        exec "${torchrun[@]}" "${PROCESSES:-2}" -m -- labs.pipeline "$@" ;;
    gpu) exec "$python" -m benchmarks.gpu "$@" ;;
    attention) exec "$python" -m labs.attention_op "$@" ;;
    gpt)
        # A result to look at within minutes, on any machine.
        [[ "${1:-}" =~ \.(yaml|yml|json)$ || " $* " =~ " --"(resume|plan) ]] ||
            set -- --max_minutes 10 "$@"
        [ "${PROCESSES:-1}" = 1 ] && exec "$python" -m labs.gpt "$@"
        exec "${torchrun[@]}" "$PROCESSES" -m -- labs.gpt "$@" ;;
    train) ;;
    *) exec "$python" -m "labs.$verb" "$@" ;;
esac

# On a CPU the run is short, so that there is a result to look at: the small sample in minutes, real
# data in an hour. A settings file, the first word of the command line, says itself how long.
# So short a run does not overfit; with dropout it would only learn less.
flags=() settings=
case "${1:-}" in *.yaml | *.yml | *.json) settings=yes ;; esac
on_cpu() {
    [[ " $* " =~ " --device"[\ =]"cpu " ]] ||
        ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
}
if [[ -z "$settings" && " $* " != *" --resume"* ]] && on_cpu "$@"; then
    minutes=3.5
    [[ ! -d /opt/minidataset && " $* " != *" --data"* ]] || minutes=60
    flags=(--max_minutes "$minutes" --dropout 0)
fi
case " $* " in *" --help "* | *" -h "* | *" --check"*) # without training there is nothing to evaluate
    exec "$python" "$root/train.py" ${flags[@]+"${flags[@]}"} "$@" ;;
esac
# train.py writes there which folder it has trained, how that ended, and on which device.
export RUN_OUTCOME="$(mktemp)"
trap 'rm -f "$RUN_OUTCOME"' EXIT
run "$python" "$root/train.py" ${flags[@]+"${flags[@]}"} "$@"

read_outcome='import json, sys
outcome = json.loads(open(sys.argv[1], encoding="utf-8").read() or "{}")
for name in ("folder", "outcome", "device", "notice"):
    print(outcome.get(name, ""))'
{ read -r folder; read -r result; read -r device; read -r notice; } \
    < <(PYTHONUTF8=1 "$python" -c "$read_outcome" "$RUN_OUTCOME")
[ -n "$folder" ] || exit 0 # a settings file with `check: true`
if [ "$result" = interrupted ]; then
    echo "the training was interrupted, so nothing is evaluated" >&2
    exit 130
fi
# On the device of the training: the first GPU may be unusable, or in use by others.
run "$python" "$root/evaluate.py" --ckpt "$folder" --device "$device"
at="$([ "$PWD" = "$root" ] || printf %q "$root/")" activate="$(printf %q "$venv/bin/activate")"
cat <<END

Next:
  tensorboard --logdir runs                    # curves (source $activate first)
  python ${at}translate.py 我昨天买了三本书。          # translate a sentence
  python ${at}evaluate.py --beam 5                  # beam search
  python ${at}report.py                             # the report of this run
  python ${at}train.py --help                       # every flag
END
# A score on the sample must not pass as one on real data: train.py's notice is the last line.
[ -z "$notice" ] || printf '\n%s\n' "$notice"
