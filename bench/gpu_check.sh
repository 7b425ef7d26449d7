#!/bin/bash
# Check every part that needs a GPU, and write the results to docs/gpu.md. The script needs a GPU and no internet.
#
#   bench/gpu_check.sh
#
# The environment variable PYTHON sets the Python to use (default: .venv/bin/python). The servers are SGLang if this
# Python has SGLang, else inference/tiny/server.py. Each cell is a run of train.py on a model with random weights. The
# table has one line per cell. If a cell fails, the remaining cells still run. The exit code is the number of failed
# cells and tests.
#
# The script can also be tried on a CPU:
#
#   SHAPE=tiny CELLS="sync-disk async-disk" STEPS=3 OUT=/tmp/gpu.md bench/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$PWD/.venv/bin/python}
SHAPE=${SHAPE:-0.6b}
STEPS=${STEPS:-8}
WORK=${WORK:-runs/gpu_check-$(date +%Y%m%d-%H%M%S)}
OUT=${OUT:-docs/gpu.md}
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || { echo "error: no torch in $PYTHON" >&2; exit 1; }
default="sync-disk async-disk async-distributed async-tensor async-disk-tree"
((gpus > 1)) && default+=" async-disk-split async-distributed-split"
CELLS=${CELLS:-$default}
[[ $SHAPE == tiny ]] && size=(gconfig.n_samples=2 gconfig.max_new_tokens=16 train_dataset.batch_size=2 server.max_total_tokens=8192)
[[ $SHAPE == tiny ]] || size=(gconfig.n_samples=8 gconfig.max_new_tokens=512 train_dataset.batch_size=16 server.max_total_tokens=131072)
type=bfloat16
[[ $gpus == 0 ]] && type=float32

mkdir -p "$WORK"
echo "$SHAPE" >"$WORK/shape"
failed=0
"$PYTHON" bench/gpu_check.py model "$WORK/model" --shape "$SHAPE" || exit 1

# 1. Run the training loop, synchronous and asynchronous, with every mode of the weight update, on one or several GPUs.
for cell in $CELLS; do
    folder=$WORK/cell-$cell
    mkdir -p "$folder"
    words=(--config configs/gsm8k.yaml "model=$WORK/model" data=tests/data/gsm8k.jsonl "${size[@]}" "actor.dtype=$type"
        "fileroot=$WORK" "experiment_name=cell-$cell" trial_name=run "max_steps=$STEPS" evaluator.interval=0 saver.interval=0
        workflow=workflow.RLVRWorkflow workflow_kwargs.reward_fn=gpu_check.reward logger.live=false)
    [[ $cell == sync-* ]] && words+=(rollout.max_head_offpolicyness=0)
    [[ $cell == *-distributed* ]] && words+=(weight_update.mode=distributed)
    [[ $cell == *-tensor* ]] && words+=(weight_update.mode=tensor)
    [[ $cell == *-tree* ]] && words+=(actor.enable_tree_training=true)
    [[ $cell == *-split ]] && words+=(server.colocate=false) || words+=(server.colocate=true)
    echo "== $cell"
    PYTHONPATH=bench "$PYTHON" train.py --dry-run "${words[@]}" >"$folder/plan" 2>&1
    watcher=
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --loop=1 >"$folder/memory" &
        watcher=$!
    fi
    PYTHONPATH=bench "$PYTHON" train.py "${words[@]}" >"$folder/log" 2>&1
    code=$?
    echo $code >"$folder/code"
    tail -1 "$folder/log"
    [[ -n $watcher ]] && kill "$watcher" && wait "$watcher" 2>/dev/null
    ((code == 0)) || failed=$((failed + 1))
done

# 2. Run the tests of code that runs differently on a GPU, such as FlexAttention.
for check in ${CHECKS-test_actor test_tree_attention}; do
    echo "== $check"
    "$PYTHON" -m pytest -q "tests/training/$check.py" >"$WORK/check-$check" 2>&1 || failed=$((failed + 1))
    tail -1 "$WORK/check-$check"
done

# 3. Write the page docs/gpu.md.
"$PYTHON" bench/gpu_check.py report "$WORK" >"$WORK/gpu.md" && cp "$WORK/gpu.md" "$OUT"
echo "$failed cells and checks failed; the page is $OUT, the logs are in $WORK"
exit $failed
