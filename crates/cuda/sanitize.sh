#!/usr/bin/env bash
# compute-sanitizer over small cases of every algorithm, level and storage type, on the first device.
#
#   cargo build --release -p etalon-cli
#   crates/cuda/sanitize.sh target/release/etalon memcheck synccheck initcheck
#   cargo build --release -p etalon-cli --features etalon-cuda/racecheck --target-dir target/racecheck
#   crates/cuda/sanitize.sh target/racecheck/release/etalon racecheck
#   TESTS=$(ls -t target/release/deps/sparsity-* | grep -v '\.d$' | head -n 1) \
#       crates/cuda/sanitize.sh target/release/etalon memcheck
#
# racecheck follows only the lane of a warp that arrives at a barrier. With the feature `racecheck` kernels are
# compiled so that all lanes arrive, and racecheck sees what each of them has read.
#
# SANITIZER names the program, LEVELS the levels (sm90a sm90a-segments sm80 sm80-99k tf32 bf16x3 portable; where
# portable is one, also its filter of linear_cross_entropy), TESTS programs of tests on a device that are run under
# each tool, too (those of `cargo test --release -p etalon-cuda --test sparsity --no-run`), LOGS a folder that keeps
# what was printed.
set -uo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3-
    exit 2
fi
etalon=$1
shift
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
levels=${LEVELS:-sm90a sm90a-segments sm80 sm80-99k tf32 bf16x3 portable}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"

# Laws: the bound, and the paths of numbers that are not finite.
laws=bound,unseen_poison,seen_poison

# Several tiles in either direction; packed and padded sequences with every option; D 128 and 256; rows that see
# nothing; a bias in boxes; a window before which warpgroups leave out blocks.
cases=(
    attention/bf16/causal/plain/tiles/dense/generic/dlse/0
    attention/bf16/window/everything/long/packed/generic/dlse/0
    attention/f16/causal/sinks/long/lengths/generic/dlse/0
    attention/bf16/full/softcap/dims/lengths/generic/dlse/12
    attention/bf16/causal/sinks/wide_heads/dense/generic/dlse/0
    attention/bf16/chunked/sinks/wide_heads/packed/generic/dlse/6
    attention/bf16/window/sinks/tiles/dense/generic/dlse/0
    attention/bf16/causal/bias/long/dense/generic/dlse/0
    attention/f16/window/bias_heads/dims/dense/holes/dlse/0
    attention/f32/array/bias_heads/groups/dense/holes/dlse/0
    attention_lse/bf16/causal/plain/long/dense/generic/dlse/0
    attention_lse/f32/window/bias/square/packed/generic/dlse/0
    lazy_attention/bf16/causal/long/dense/reach_short/learned/generic/dlse/scale/0
    lazy_attention/f16/window/dims/lengths/reach_whole/mixed/generic/dlse/default_scale/0
    lazy_attention/f32/array/groups/packed/reach_beyond/mixed/ties/dlse/default_scale/0
    linear_attention/bf16/per_head/usual/both/micro_chunks/dense/one/generic/0
    linear_attention/bf16/per_head/usual/both/long/dense/one/generic/0
    linear_attention/bf16/per_token/strong/both/long/packed/root/range/0
    linear_attention/bf16/per_token/strong/both/micro_chunks/dense/one/generic/0
    linear_attention/f16/per_token/resets/both/spans/packed/root/range/0
    linear_attention/f32/none/strong/final/micro_chunks/lengths/negative/generic/0
    linear_cross_entropy/bf16/ragged/everything/everything/mean/some/all/dyadic/0
    linear_cross_entropy/bf16/long/plain/plain/mean/none/loss/generic/0
    linear_cross_entropy/f32/big/bias/smoothing/sum/some/all/generic/0
)
list=$(IFS=,; echo "${cases[*]}")
# Kernels of their own: what is left out of a gradient, and how much that is.
filtered=linear_cross_entropy/f32/big/bias/smoothing/sum/some/all/generic/0
# Level sm90a-segments computes nothing but these: several segments of either kind of decay.
segments=linear_attention/bf16/per_head/usual/both/long/dense/one/generic/0,linear_attention/f16/none/strong/final/long/lengths/negative/generic/0

# Kernels that a tool reports without cause. initcheck does not follow writes of the copy engine to memory: `move`,
# which spreads such results, `bias`, which sums da, and copies to the host read them. Elements that `totals` and
# `gradients` read beyond the last class are not used. synccheck calls threads divergent that reach a named barrier at
# two addresses, which PTX allows and a compiler makes of one: it reports a kernel of ten lines that does so, too.
known() {
    case "$1 $2" in
    "initcheck sm90a") echo "move bias cudaMemcpy" ;;
    "initcheck sm90a-segments") echo "cudaMemcpy" ;;
    "initcheck portable" | "initcheck filter") echo "totals gradients" ;;
    "synccheck sm90a") echo "flow attend states gradients_grouped" ;;
    "synccheck sm90a-segments") echo "sums sums_back attend attend_plain states gradients_grouped" ;;
    esac
}

# Reports of a kind that is never without cause, whatever the kernel: of synccheck all but the one above.
unknown_kinds() {
    [ "$1" = synccheck ] || return 0
    grep -aoE 'Barrier error detected\. .*' "$2" | grep -v 'Divergent thread(s) in block' | sort -u
}

# Runs a program under a tool and prints what was found. Fails on what is not known, and where a verdict is negative.
check() {
    local tool=$1 what=$2 log=$logs/$1-$2.txt begun=$SECONDS
    shift 2
    "$sanitizer" --tool "$tool" --error-exitcode 99 --show-backtrace no --print-limit 10000000 "$@" >"$log" 2>&1
    local status=$? verdict reported new=""
    verdict=$(grep -aE '^(PASSED|FAILED|test result)' "$log")
    reported=$(grep -aoE '(at [a-z0-9_]+\+0x|by cuda[A-Za-z]+)' "$log" | sed -E 's/^(at|by) //; s/\+0x$//' | sort | uniq -c | sort -rn)
    for name in $(awk '{ print $2 }' <<<"$reported"); do
        grep -qw "$name" <<<"$(known "$tool" "$what")" || new+=" $name"
    done
    new+=$(unknown_kinds "$tool" "$log")
    echo "$tool $what: ${verdict:-no verdict, see $log}, $((SECONDS - begun)) s; reports: $(xargs <<<"${reported:-none}")"
    [[ $verdict =~ ^(PASSED|test result: ok) && -z $new ]] && { [ $status -eq 0 ] || [ -n "$reported" ]; } && return
    echo "$tool $what: FAILED (status $status)${new:+, not known:$new}; see $log"
    return 1
}

# The verdict of the suite on a level.
verify() {
    local tool=$1 what=$2 level=$3 laws=$4 cases=$5
    check "$tool" "$what" "$etalon" verify --in-process --tier "cuda/$level" --law "$laws" --case "$cases" --progress 1000
}

failed=0
for tool in "$@"; do
    for level in $levels; do
        cases=$list
        [ "$level" = sm90a-segments ] && cases=$segments
        verify "$tool" "$level" "$level" "$laws" "$cases" || failed=1
        if [ "$level" = portable ]; then
            verify "$tool" filter portable filter "$filtered" || failed=1
        fi
    done
    for test in ${TESTS:-}; do
        check "$tool" "$(basename "$test")" "$test" --test-threads 1 || failed=1
    done
done
exit $failed
