#!/usr/bin/env bash
# Make the environments of the toolkits that the benchmarks compare with, one each: they do not agree on versions.
#
#   bash benchmarks/peers/install.sh            all
#   bash benchmarks/peers/install.sh fairseq    one
#
# benchmarks/requirements-NAME.txt → benchmarks/.envs/NAME. What stands there behind "# no-deps:" is installed last and without
# what it asks for: a toolkit that asks for an older torch runs on the one above it all the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || set -- opennmt fairseq ctranslate2 pymarian
for name in "$@"; do
    python3 -m venv --clear ".envs/$name"
    pip=(".envs/$name/bin/python" -m pip install --quiet)
    "${pip[@]}" -r "requirements-$name.txt"
    # No build isolation: what is compiled must be compiled against the torch that it will run with.
    sed -n 's/^# no-deps: //p' "requirements-$name.txt" | xargs -r "${pip[@]}" --no-deps --no-build-isolation
    touch ".envs/$name/complete"
    echo "$name: installed in $PWD/.envs/$name"
done
