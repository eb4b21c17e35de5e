#!/usr/bin/env bash
# What FP8 attention does to whole trainings, on any GPU: steps of long contexts, two GPUs, packed documents, loss curves,
# ViT-Huge, FP8 recipes, precision policies.
#
#   OUT=runs LIMIT=900 PRICE=4 results/training.sh
#
# The commands come in the order of their worth.  One that has ended well is written to $OUT/done.txt and skipped from
# then on; one that was killed, was stopped by LIMIT (seconds) or failed is taken up again by the next call, and what it
# had finished is kept: rows are on disk while it runs, too.  `attnbench train --show $OUT/steps` reads them at any time.
# PARTS and the others below make it smaller: PARTS=steps CELLS=size=3b,seqlen=32768,slices=4 ...
set -u
OUT=${OUT:-training} LIMIT=${LIMIT:-1200} PARTS=${PARTS:-steps long packing vit recipe policies learning ranks}
DEVICE=${DEVICE:-auto} PRICE=${PRICE:-} GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c UUID)} ROUNDS=${ROUNDS:-8}
# Cells and choices are those of steps.py.  A step of one GPU has 32,768 tokens; of the 3b and 8b models a quarter and
# an eighth is trained, so that it is short.
CELLS=${CELLS:-size=3b,seqlen=32768,slices=4 size=8b,seqlen=32768,slices=8
    size=3b,seqlen=32768,slices=4,linears=te-fp8 size=8b,seqlen=32768,slices=8,linears=te-fp8
    size=3b,seqlen=8192,batch=4,slices=4 size=8b,seqlen=8192,batch=4,slices=8}
LONG=${LONG:-size=8b,seqlen=131072,slices=16 size=3b,seqlen=131072,slices=14}
CHOICES=${CHOICES:-sdpa auto auto-fp8 triton:fp8>triton:fp8}
# Documents of up to 8k and 32k tokens, 32k and 64k tokens a step: end to end, and as rows padded to the longest.
PACKING=${PACKING:-size=medium,layers=8,vocab=272,seqlen=8192,batch=4 size=medium,layers=8,vocab=272,seqlen=32768,batch=2}
PACKING_ROUNDS=${PACKING_ROUNDS:-100}
PACKING_CHOICES=${PACKING_CHOICES:-auto,packing=padded auto-fp8,packing=padded sdpa-flash auto auto-fp8
    triton:fp8>triton:fp8}
# timm's block and TransformerEngine's, as the article starts them, and with the host taken out.
VIT=${VIT:-model=vit-huge,batch=128 model=vit-huge,batch=64}
VIT_CHOICES=${VIT_CHOICES:-sdpa own,block=te own,block=te,linears=te-fp8 sdpa,graphs=true auto,graphs=true
    own,block=te,graphs=true own,block=te,linears=te-fp8,graphs=true auto-fp8,linears=te-fp8,graphs=true
    sdpa,compile=true,graphs=true}
RECIPE=${RECIPE:-size=3b,seqlen=8192,batch=4,slices=4,packing=packed}
RECIPE_CHOICES=${RECIPE_CHOICES:-sdpa-flash auto auto-fp8 auto,linears=te-fp8 auto-fp8,linears=te-fp8
    auto,linears=float8-tensorwise auto-fp8,linears=float8-tensorwise}
POLICIES=${POLICIES:-size=1b,seqlen=1024,batch=4,slices=4,lr=3e-4,warmup=20} POLICY_ROUNDS=${POLICY_ROUNDS:-120}
RANKS_SIZE=${RANKS_SIZE:-1b} RANKS_LENGTH=${RANKS_LENGTH:-4096} RANKS_BATCH=${RANKS_BATCH:-4} STEPS=${STEPS:-30}
# The seeds are as many as a verdict takes with 90 % at the scatter of 100 pairs: docs/explanation/end-to-end.md.
LEARN=${LEARN:---size medium --layers 2 --vocab 272 --seqlen 4096 --batch 1 --steps 200 --lr 3e-4 --warmup 40}
SEEDS=${SEEDS:-50} CANDIDATES=${CANDIDATES:-triton:fp8>triton:fp8 te:fp8>te:fp8 triton:fp8>fa4:bf16}

mkdir -p "$OUT" && touch "$OUT/done.txt" || exit 1
exec 9>"$OUT/.lock"
flock -w 10 9 || { echo "another call is still running in $OUT"; exit 1; } # or what it started, if it was killed itself
trap 'exit 130' INT
here=$(cd "$(dirname "$0")" && pwd) left=()

run() { # PAGE COMMAND...: run it unless it is done, and keep what it prints
    local page=$OUT/$1
    shift
    grep -Fxq -- "$*" "$OUT/done.txt" && return
    echo "== $*"
    timeout --foreground -k 30 "$LIMIT" "$@" >"$page.partial"
    local code=$?
    if [ $code = 0 ]; then
        mv "$page.partial" "$page"
        echo "$*" >>"$OUT/done.txt"
    else
        rm -f "$page.partial"
        left+=("exit $code$([ $code = 124 ] && echo ', LIMIT'): $*")
    fi
}

train() { # FOLDER LAUNCHER... -- OPTIONS...
    local folder=$1 launcher=()
    shift
    while [ "$1" != -- ]; do launcher+=("$1") && shift; done
    shift
    run "$folder.md" ${launcher[@]+"${launcher[@]}"} attnbench train "$@" --device "$DEVICE" \
        ${PRICE:+--price-per-hour "$PRICE"} --resume --out "$OUT/$folder" --format markdown
}

steps() { # a command a cell, so that one that fails costs no other
    local cell
    for cell in $CELLS; do
        turns steps "$cell,checkpointing=true" --choices $CHOICES -- python
    done
}

long() {
    two long || return
    local cell
    for cell in $LONG; do
        turns long "$cell,checkpointing=true,parallel=fsdp2,context_parallel=2" --choices $CHOICES -- $(ranks_of 2)
    done
}

packing() { # a model for each choice, so that their losses tell whether they learn alike
    local cell
    for cell in $PACKING; do
        turns packing "$cell,packing=packed" --choices $PACKING_CHOICES --learn --rounds "$PACKING_ROUNDS" -- python
    done
}

vit() { # the article's experiment
    local cell
    for cell in $VIT; do
        turns vit "$cell" --choices $VIT_CHOICES -- python
    done
}

recipe() { # FP8 linears and FP8 attention on packed documents, with FSDP2, checkpointing and compiled blocks
    turns recipe "$RECIPE,checkpointing=true,compile=true,parallel=fsdp2" --choices $RECIPE_CHOICES \
        -- $(ranks_of "$GPUS")
}

policies() { # what is kept and computed in which type: memory, speed and loss
    local policy choices=()
    for policy in autocast bf16 fp32-and-bf16 fsdp-mixed fp32; do choices+=("sdpa,policy=$policy"); done
    turns policies "$POLICIES,parallel=fsdp2" --choices "${choices[@]}" --learn --rounds "$POLICY_ROUNDS" \
        -- $(ranks_of "$GPUS")
}

turns() { # FOLDER CELL OPTIONS... -- LAUNCHER...: the choices of a cell in turn
    local folder=$1 cell=$2 options=()
    shift 2
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    run "$folder-$cell.txt" "$@" "$here/steps.py" "$cell" --rounds "$ROUNDS" "${options[@]}" --device "$DEVICE" \
        --out "$OUT/$folder"
}

ranks_of() { # N: a launcher of so many processes, one without a GPU
    echo python -m torch.distributed.run --standalone --nproc-per-node $(($1 > 0 ? $1 : 1))
}

two() { # PART: whether there are two GPUs
    [ "$GPUS" -ge 2 ] || { echo "== $1: left out, there are fewer than two GPUs" && false; }
}

learning() { # the baseline is trained once, by the first of them
    local plan
    for plan in $CANDIDATES; do
        train learning -- $LEARN --seeds "$SEEDS" --checkpoint-every 100 --attention "$plan" --compare sdpa-flash
    done
}

ranks() { # one GPU alone, which efficiency is told from, then two by DDP and by FSDP2
    two ranks || return
    local parallel options="--size $RANKS_SIZE --seqlen $RANKS_LENGTH --batch $RANKS_BATCH --steps $STEPS --seeds 1
        --checkpoint-every 0 --checkpointing --attention auto --fp8 --compare sdpa"
    train ranks -- $options
    for parallel in fsdp2 ddp; do
        train ranks torchrun --standalone --nproc-per-node 2 --no-python -- $options --parallel $parallel
    done
}

for part in $PARTS; do
    "$part"
done
echo "== rows, pages and tables are in $OUT; ${#left[@]} commands are not done"
[ ${#left[@]} = 0 ] || { printf '%s\n' "${left[@]}" && exit 1; }
