#!/usr/bin/env bash
# What FP8 attention does to whole trainings: GPT at three lengths, the article's ViT-Huge, two GPUs, loss curves.
#
#   OUT=runs LIMIT=900 PRICE=4 results/nvidia-h200/training.sh
#
# The commands come in the order of their worth.  One that has ended well is written to $OUT/done.txt and skipped from
# then on; one that was killed, was stopped by LIMIT (seconds) or failed is taken up again by the next call, and the runs
# that it had finished are kept: a run's row is on disk while it runs, too.  `attnbench train --show $OUT/throughput`
# reads them at any time.  PARTS, SIZE, STEPS and the others below make it smaller: PARTS=throughput LENGTHS=32768 ...
set -u
OUT=${OUT:-training} LIMIT=${LIMIT:-1200} PARTS=${PARTS:-throughput vit ranks learning}
DEVICE=${DEVICE:-auto} PRICE=${PRICE:-} GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c UUID)}
SIZE=${SIZE:-medium} STEPS=${STEPS:-30} LENGTHS=${LENGTHS:-32768 8192 2048} TOKENS=${TOKENS:-32768} # tokens a step
LINEARS=${LINEARS:-bf16 te-fp8} VIT_SIZE=${VIT_SIZE:-huge} VIT_BATCH=${VIT_BATCH:-64}
RANKS_SIZE=${RANKS_SIZE:-1b} RANKS_LENGTH=${RANKS_LENGTH:-4096} RANKS_BATCH=${RANKS_BATCH:-4}
LEARN_SIZE=${LEARN_SIZE:-small} LEARN_LENGTH=${LEARN_LENGTH:-1024} LEARN_BATCH=${LEARN_BATCH:-16}
LEARN_STEPS=${LEARN_STEPS:-500} SEEDS=${SEEDS:-6}
CANDIDATES=${CANDIDATES:-te:fp8>te:fp8 triton:fp8>triton:fp8 fa3:fp8>fa3:bf16}

mkdir -p "$OUT" && touch "$OUT/done.txt" || exit 1
exec 9>"$OUT/.lock"
flock -w 10 9 || { echo "another call is still running in $OUT"; exit 1; } # or what it started, if it was killed itself
trap 'exit 130' INT
left=()

go() { # FOLDER COMMAND...: run it unless it is done
    local folder=$OUT/$1
    shift
    set -- "$@" --device "$DEVICE" ${PRICE:+--price-per-hour "$PRICE"}
    grep -Fxq -- "$*" "$OUT/done.txt" && return
    echo "== $*"
    timeout --foreground -k 30 "$LIMIT" "$@" --resume --out "$folder" --format markdown >"$folder.partial"
    local code=$?
    if [ $code = 0 ]; then
        mv "$folder.partial" "$folder.md"
        echo "$*" >>"$OUT/done.txt"
    else
        rm -f "$folder.partial"
        left+=("exit $code$([ $code = 124 ] && echo ', LIMIT'): $*")
    fi
}

throughput() {
    for linears in $LINEARS; do
        for length in $LENGTHS; do
            for fp8 in --fp8 ""; do
                go throughput attnbench train --size "$SIZE" --seqlen "$length" --batch $((TOKENS / length)) \
                    --steps "$STEPS" --seeds 1 --checkpoint-every 0 --linears "$linears" --attention auto $fp8 --compare sdpa
            done
        done
    done
}

vit() { # plain against TransformerEngine's block in bf16 and in FP8, and attention chosen here
    local what
    for what in "--block te --linears te-fp8" "--block te" "--attention auto --fp8 --linears te-fp8" \
        "--attention auto --fp8" "--attention auto"; do
        go vit attnbench train --model vit-huge --size "$VIT_SIZE" --batch "$VIT_BATCH" --steps "$STEPS" --seeds 1 \
            --checkpoint-every 0 $what --compare sdpa --compare-linears bf16
    done
}

ranks() { # one GPU alone, which efficiency is told from, then two by DDP and by FSDP2
    if [ "$GPUS" -lt 2 ]; then
        echo "== ranks: left out, there are fewer than two GPUs"
        return
    fi
    local run="attnbench train --size $RANKS_SIZE --seqlen $RANKS_LENGTH --batch $RANKS_BATCH --steps $STEPS --seeds 1
        --checkpoint-every 0 --checkpointing --attention auto --fp8 --compare sdpa"
    go ranks $run
    for parallel in fsdp2 ddp; do
        go ranks torchrun --standalone --nproc-per-node 2 --no-python $run --parallel $parallel
    done
}

learning() { # the baseline is trained once, by the first of them
    for plan in $CANDIDATES; do
        go learning attnbench train --size "$LEARN_SIZE" --seqlen "$LEARN_LENGTH" --batch "$LEARN_BATCH" \
            --steps "$LEARN_STEPS" --seeds "$SEEDS" --attention "$plan" --compare bf16
    done
}

for part in $PARTS; do
    "$part"
done
echo "== rows, pages and tables are in $OUT; ${#left[@]} commands are not done"
[ ${#left[@]} = 0 ] || { printf '%s\n' "${left[@]}" && exit 1; }
