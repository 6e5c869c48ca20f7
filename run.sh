#!/usr/bin/env bash
# One command from a fresh machine to a BLEU card, another to the tests. Works from any directory; again is quick.
#
#   bash run.sh                        install, train, evaluate (data: /opt/minidataset if it is there, else sample/)
#   bash run.sh -- --max_minutes 20    the same; what stands after -- goes to train.py (paths are seen from here)
#   bash run.sh test                   install and run the tests; what stands after -- goes to pytest
#   bash run.sh lenet|wikitext|attention|pipeline|collectives|gpt    another lab; what stands after -- goes to it
#   VENV=/path bash run.sh             keep the virtual environment elsewhere (default: .venv here)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
verb="${1:-train}"
[ "$verb" = "--" ] && verb=train || shift || true
[ "${1:-}" = "--" ] && shift
labs="lenet wikitext attention pipeline collectives gpt"
case " train test $labs " in *" $verb "*) ;; *)
    echo "error: unknown verb '$verb'; use: bash run.sh [test|${labs// /|}] [-- FLAGS]" >&2; exit 2 ;;
esac

# Waiting threads sleep instead of spinning: on a machine that others use too, spinning costs a multiple of the time.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" PYTHONUNBUFFERED=1
venv="${VENV:-$root/.venv}"
python="$venv/bin/python"

# install FILE: its packages into the virtual environment, unless just this file was installed before.
install() {
    local stamp="$venv/.installed-$(basename "$1")"
    if [ ! -x "$python" ]; then
        for candidate in python3 python3.12 python3.11 python3.10; do
            command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
            candidate=
        done
        [ -n "${candidate:-}" ] || { echo "error: Python 3.10 or later with venv is needed (apt install python3-venv, or conda)" >&2; exit 2; }
        echo "making a virtual environment in $venv"
        "$candidate" -m venv "$venv"
    fi
    cmp -s "$1" "$stamp" && return
    echo "installing $(basename "$1"); this happens once"
    "$python" -m pip install --quiet --disable-pip-version-check -r "$1"
    cp "$1" "$stamp"
}

install "$root/requirements.txt"
if [ "$verb" = test ]; then
    install "$root/requirements-dev.txt"
    cd "$root"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    exec "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"  # a file at a time on each core
fi

cd "$root"
case "$verb" in
    pipeline) exec "$python" -m torch.distributed.run --standalone --nproc_per_node "${PROCESSES:-2}" -m -- labs.pipeline "$@" ;;
    attention) exec "$python" -m labs.attention_op "$@" ;;
    gpt)  # a result to look at within minutes, wherever it runs
        [[ " $* " == *" --resume"* ]] || set -- --max_minutes 10 "$@"
        [ "${PROCESSES:-1}" = 1 ] && exec "$python" -m labs.gpt "$@"
        exec "$python" -m torch.distributed.run --standalone --nproc_per_node "$PROCESSES" -m -- labs.gpt "$@" ;;
    train) ;;
    *) exec "$python" -m "labs.$verb" "$@" ;;
esac

# On a CPU the run is kept short, so that there is a result to look at: the small sample in minutes, real data in an hour.
flags=()
if [[ " $* " != *" --resume"* ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    if [[ -d /opt/minidataset || " $* " == *" --data"* ]]; then flags=(--max_minutes 60); else flags=(--max_minutes 3.5); fi
fi
"$python" train.py ${flags[@]+"${flags[@]}"} "$@"

# Evaluate this very run: the one named in the flags, else the newest.
ckpt=()
while [ $# -gt 1 ]; do
    case "$1" in
        --resume) ckpt=(--ckpt "$2") ;;
        --run) [[ "$2" == */* ]] && ckpt=(--ckpt "$2") || ckpt=(--ckpt "runs/$2") ;;
    esac
    shift
done
"$python" evaluate.py ${ckpt[@]+"${ckpt[@]}"}
cat <<END

Next 接下来:
  tensorboard --logdir runs                    # curves 曲线   (source $venv/bin/activate first 先激活环境)
  python translate.py 我昨天买了三本书。          # translate 翻译
  python evaluate.py --beam 4                  # beam search 束搜索
  python train.py --help                       # every flag 全部参数
END
