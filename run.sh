#!/usr/bin/env bash
# One command from a fresh machine (Linux, macOS or WSL) to a BLEU card, another to the tests. Again is quick.
#
#   bash run.sh                        install, train, evaluate (data: /opt/minidataset if it is there, else sample/)
#   bash run.sh -- --max_minutes 20    the same; what stands after -- goes to train.py
#   bash run.sh test                   install and run the tests; what stands after -- goes to pytest
#   bash run.sh lenet|wikitext|attention|pipeline|collectives|gpt    another lab; what stands after -- goes to it
#   bash run.sh gpu                    on a GPU: is the arithmetic right there, how fast is it; ten minutes, a file to send back
#
#   VENV=/path bash run.sh             keep the virtual environment elsewhere (default: .venv beside this file)
#   PROCESSES=4 bash run.sh gpt        processes of gpt (else 1) or pipeline (else 2)
#   TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu bash run.sh     PyTorch from there: a build without CUDA
#
# Works from any directory: paths are seen from there, and runs/ is made there.
set -euo pipefail

root="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
verb="${1:-train}"
[ "$verb" = "--" ] && verb=train || shift || true
[ "${1:-}" = "--" ] && shift
labs="lenet wikitext attention pipeline collectives gpt"
case " train test gpu $labs " in *" $verb "*) ;; *)
    echo "error: unknown verb '$verb'; use: bash run.sh [test|gpu|${labs// /|}] [-- FLAGS]" >&2; exit 2 ;;
esac
case "$(uname -s)" in Linux | Darwin) ;; *)
    echo "error: this needs Linux, macOS or WSL (the Linux inside Windows: https://aka.ms/wsl)" >&2; exit 2 ;;
esac

export PYTHONUNBUFFERED=1
# Waiting threads sleep instead of spinning: where others use the machine too, spinning costs a multiple. Elsewhere engine/ says how.
[ "$(uname -s)" != Darwin ] || export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
venv="${VENV:-$root/.venv}"
[ "${venv#/}" != "$venv" ] || venv="$PWD/$venv"
python="$venv/bin/python"

# run COMMAND: as a child, to which the signals that come here are sent on. After one of them nothing more is begun.
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

# installed FILE: was just this file installed before, under just these constraints?
installed() { [ -x "$python" ] && cat "$1" "$root/constraints.txt" | cmp -s - "$venv/.installed-$(basename "$1")"; }

# install FILE: its packages into the virtual environment, in the versions that constraints.txt names, unless done before.
install() {
    ! installed "$1" || return 0
    mkdir -p "$venv"; exec 9>>"$venv/.lock" # two at once would write over each other
    ! command -v flock >/dev/null || flock -n 9 || { echo "another run.sh installs into $venv; waiting for it"; flock 9 || true; }
    if installed "$1"; then exec 9>&-; return; fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then # no environment, or one whose making was broken off
        for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
            # PyTorch has packages for these versions. On Debian and Ubuntu ensurepip is missing until python3-venv is installed.
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null && break
            candidate=
        done
        [ -n "$candidate" ] || { echo "error: Python 3.10 to 3.14 with venv is needed (apt install python3-venv, or conda)" >&2; exit 2; }
        echo "making a virtual environment in $venv"
        run "$candidate" -m venv "$venv"
    fi
    echo "installing $(basename "$1") into $venv; this happens once"
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        run "$python" -m pip install --disable-pip-version-check --index-url "$TORCH_INDEX_URL" "$(grep '^torch' "$root/requirements.txt")"
    elif [ "$(uname -s)" = Linux ] && ! "$python" -c 'import torch' 2>/dev/null; then
        echo "PyTorch with CUDA takes 5.3 GB. Without an NVIDIA GPU, here or where your jobs run, a fraction is enough: stop with Ctrl-C and type"
        echo "    TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu bash $(printf %q "$0")"
    fi
    run "$python" -m pip install --disable-pip-version-check -c "$root/constraints.txt" -r "$1"
    cat "$1" "$root/constraints.txt" > "$venv/.installed-$(basename "$1")"; exec 9>&-
}

install "$root/requirements.txt"
export PATH="$venv/bin:$PATH" # PyTorch calls ninja, which was installed there, by its name
if [ "$verb" = test ]; then
    install "$root/requirements-dev.txt"
    cd "$root"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    export PYTHONUTF8=1 # what tests read is UTF-8, whatever the terminal's encoding
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # each core has a file of tests, and no time for waiting threads
    exec "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"  # a file at a time on each core
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for the labs, which are modules
[ "$verb" != gpu ] || install "$root/requirements-dev.txt" # its first stage is a test
case "$verb" in
    pipeline) [ "${PROCESSES:-2}" = 1 ] && exec "$python" -m labs.pipeline "$@"
        exec "$python" -m torch.distributed.run --standalone --nproc_per_node "${PROCESSES:-2}" -m -- labs.pipeline "$@" ;;
    gpu) exec "$python" -m benchmarks.gpu "$@" ;;
    attention) exec "$python" -m labs.attention_op "$@" ;;
    gpt)  # a result to look at within minutes, wherever it runs
        [[ "${1:-}" =~ \.(yaml|yml|json)$ || " $* " =~ " --"(resume|plan) ]] || set -- --max_minutes 10 "$@"
        [ "${PROCESSES:-1}" = 1 ] && exec "$python" -m labs.gpt "$@"
        exec "$python" -m torch.distributed.run --standalone --nproc_per_node "$PROCESSES" -m -- labs.gpt "$@" ;;
    train) ;;
    *) exec "$python" -m "labs.$verb" "$@" ;;
esac

# On a CPU the run is kept short, so that there is a result to look at: the small sample in minutes, real data in an hour.
# A settings file comes first on the command line, and says itself how long.
flags=() settings=
case "${1:-}" in *.yaml | *.yml | *.json) settings=yes ;; esac
if [[ -z "$settings" && " $* " != *" --resume"* ]] &&
    { [[ " $* " =~ " --device"[\ =]"cpu " ]] || ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }; then
    if [[ -d /opt/minidataset || " $* " == *" --data"* ]]; then flags=(--max_minutes 60); else flags=(--max_minutes 3.5); fi
fi
case " $* " in *" --help "* | *" -h "* | *" --check"*) # nothing is trained, so nothing is evaluated
    exec "$python" "$root/train.py" ${flags[@]+"${flags[@]}"} "$@" ;;
esac
# The name of the run, so that just this one is evaluated.
name= word=
if [ -n "$settings" ]; then # which may name it; a wrong file is train.py's to refuse
    read_name='import pathlib, sys; del sys.path[0]; from engine.config import read_settings
values = read_settings(pathlib.Path(sys.argv[1])); print(values.get("resume") or values.get("run") or "")'
    name="$("$python" -c "$read_name" "$1" 2>/dev/null || true)"
fi
for next in "$@" ""; do
    case "$word" in
        --run=* | --resume=*) name="${word#*=}" ;;
        --run | --resume) name="$next" ;;
    esac
    word="$next"
done
case "$name" in "~/"*) name="$HOME/${name#??}" ;; esac # --run=~/x: the shell leaves it so
[ -n "$name" ] || { name="$(date +%Y-%m-%d_%H-%M-%S)-$$"; set -- "$@" --run "$name"; }
run "$python" "$root/train.py" ${flags[@]+"${flags[@]}"} "$@"

folder="$name" # with a / it is a path, as for train.py
case "$name" in */*) ;; *) [ ! -d "runs/$name" ] || folder="runs/$name" ;; esac
[ -f "$folder/train.log" ] || exit 0 # a settings file with `check: true`
if tail -n 1 "$folder/train.log" | grep -q "to go on:"; then
    echo "the training was interrupted, so nothing is evaluated" >&2
    exit 130
fi
run "$python" "$root/evaluate.py" --ckpt "$folder"
at="$([ "$PWD" = "$root" ] || printf %q "$root/")" activate="$(printf %q "$venv/bin/activate")"
cat <<END

Next 接下来:
  tensorboard --logdir runs                    # curves 曲线   (source $activate first 先激活环境)
  python ${at}translate.py 我昨天买了三本书。          # translate 翻译
  python ${at}evaluate.py --beam 4                  # beam search 束搜索
  python ${at}train.py --help                       # every flag 全部参数
END
# A toy score must not pass as one on real data: what train.py said of the sample (text/rows.py) is also the last thing said.
if notice="$(grep -o -m 1 'bundled sample, not WMT19.*' "$folder/train.log")"; then
    printf '\n%s\n' "$notice"
fi
