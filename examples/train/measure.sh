#!/usr/bin/env bash
# Measures the figures of docs/training.md on a machine with nothing else to do, in a folder of results:
#     ./measure.sh speed RESULTS     # about 6 minutes: tokens a second, in turns, and peak memory
#     ./measure.sh more RESULTS      # about 25 minutes: batch 2, the other mixers, bfloat16, calls, the showcase
#     ./measure.sh curves RESULTS    # about 40 minutes: losses of 150 steps of 4 layers, and the SVG files of the page
# PYTHON names the interpreter; etalon must be installed from a release build.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
part=${1:?"speed, more or curves"}
out=$(mkdir -p "${2:?"a folder for results"}" && cd "$2" && pwd)

train() {
    local name=$1
    shift
    "$python" "$here/train.py" "$@" --log "$out/$name.jsonl" | tee "$out/$name.txt"
}

memory() {
    local name=$1
    shift
    "$python" "$here/train.py" --memory --steps 3 "$@" | tee "$out/$name.txt"
}

speed() {
    train softmax --steps 9
    memory softmax_memory
}

more() {
    memory softmax_memory_mapped --mmap-threshold 1048576
    train softmax_mapped --steps 5 --mmap-threshold 1048576
    train softmax_batch2 --steps 5 --batch 2
    memory softmax_batch2_memory --batch 2
    train softmax_bf16 --steps 5 --bf16 --contenders eager,compile,etalon,etalon+compile,etalon-mixer
    train linear --steps 5 --mixer linear
    train lazy --steps 3 --mixer lazy
    "$python" "$here/calls.py" --compile | tee "$out/calls.txt"
    "$python" "$here/calls.py" --avx2 --only softmax | tee "$out/calls_avx2.txt"
    # Minutes a call with all tokens: without instructions for bfloat16 PyTorch multiplies element by element.
    "$python" "$here/calls.py" --avx2 --only loss --tokens 256 --rounds 3 | tee -a "$out/calls_avx2.txt"
    "$python" "$here/test_time_training.py" --steps 9 | tee "$out/ttt.txt"
    "$python" "$here/test_time_training.py" --memory | tee "$out/ttt_memory.txt"
    "$python" "$here/jvp.py" --points 2048 --batch 1 --steps 1 | tee "$out/jvp.txt"
}

curves() {
    local page=$here/../../docs/assets
    train curve --layers 4 --steps 150 --warm-up 20 --contenders eager,compile,chunked,etalon+compile
    "$python" "$here/plot.py" "$out/curve.jsonl" --window 15 --out "$page/training" --title "Loss of a decoder"
    "$python" "$here/test_time_training.py" --width 64 --heads 1 --steps 200 --log "$out/ttt.jsonl" | tee "$out/ttt_curve.txt"
    "$python" "$here/plot.py" "$out/ttt.jsonl" --window 15 --out "$page/inner_loop" --title "Error after an inner step"
}

case $part in
speed | more | curves) "$part" ;;
*) echo "$part is not one of speed, more, curves" && exit 2 ;;
esac
