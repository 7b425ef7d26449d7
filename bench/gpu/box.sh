#!/usr/bin/env bash
# Eight minutes on a GPU box:   bash bench/gpu/box.sh [--cpu] [--budget S] [CELL ...]
# Cells are the functions below; without names, the list `first`. Each has a time limit, and a failed one ends no other.
# Results in $OUT: summary.md (a page), summary.json, logs.tar.gz, a profile. --cpu tries everything with tiny sizes.
set -u
cd "$(dirname "$0")/../.." || exit 1
PY=${PY:-python3} SITE=${SITE:-/tmp/site} OUT=${OUT:-/tmp/out} WORK=${WORK:-/tmp/box} BUDGET=480 CPU=
while [ $# -gt 0 ]; do case $1 in --cpu) CPU=1; shift ;; --budget) BUDGET=$2; shift 2 ;; *) break ;; esac; done
CELLS=bench/gpu/cells.py
mkdir -p "$OUT" "$WORK/logs" "$WORK/runs"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$SITE OUT WORK
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton
SHM=$WORK SCALE=1 SHAPE=1.5b ROWS=32 LONGEST=2048 WORKERS=8 DEMO_STEPS=64 MAZE_STEPS=14 STEPS=6 PROMPTS=16
if [ -n "$CPU" ]; then
  export CUDA_VISIBLE_DEVICES=
  SCALE=10 SHAPE=tiny ROWS=8 LONGEST=64 WORKERS=1 DEMO_STEPS=3 MAZE_STEPS=2 STEPS=2 PROMPTS=2
elif [ -d /dev/shm ]; then SHM=/dev/shm; fi
START=$(date +%s)

keep() { flock "$WORK/lock" tar czf "$OUT/logs.tar.gz" -C "$WORK" logs $(cd "$WORK" && ls -d runs/*/*/{metrics.jsonl,config.yaml,logs} 2>/dev/null); }
cell() { # cell NAME LIMIT COMMAND...: the page gets its figures, and last words if it failed. TRIAL names a run.
  local name=$1 limit=$(($2 * SCALE)) log=$WORK/logs/$1.log begin now rc=-1; shift 2
  begin=$(date +%s); now=$((START + BUDGET * SCALE - begin)); [ "$limit" -gt "$now" ] && limit=$now
  if [ "$limit" -lt 8 ]; then echo "not started, the time was over" >"$log"
  else timeout -s INT -k 8 "$limit" "$@" >"$log" 2>&1 </dev/null; rc=$?; fi
  [ -z "${TRIAL:-}" ] || "$PY" -S $CELLS run "$(ls -d "$WORK"/runs/*/"$TRIAL" 2>/dev/null | tail -1)" >>"$log" 2>&1
  flock "$WORK/lock" "$PY" -S $CELLS note "$name" $rc $(($(date +%s) - begin)) $limit
  keep; }
tests() { # tests NAME LIMIT FILE...
  PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS=1 cell "$1" "$2" "$PY" -m pytest -rfE -p xdist.plugin -p anyio.pytest_plugin \
    -p no:cacheprovider -n $WORKERS --dist worksteal -W default -m "not runs" --tb=short --maxfail=60 "${@:3}"; }
run() { # run NAME LIMIT WORDS...: train.py, and a line about its metrics
  TRIAL=$1 OMP_NUM_THREADS=1 cell "$1" "$2" "$PY" train.py "${@:3}" fileroot="$WORK/runs" trial_name="$1" recover_interval=0; }
model() { [ -f "$SHM/model-$SHAPE/config.json" ] || cell make-model 100 "$PY" $CELLS make $SHAPE "$SHM/model-$SHAPE"; }
train() { # train NAME LIMIT OPTIONS...: training steps without a server
  model; cell "$1" "$2" "$PY" $CELLS train "$SHM/model-$SHAPE" --name "$1" --rows $ROWS --longest $LONGEST "${@:3}"; }

info() { nvidia-smi 2>&1 | head -n 15 >"$WORK/logs/smi.log"; cell info 60 "$PY" $CELLS info; }
unit() { tests unit 150 tests/training tests/test_ppo.py tests/extras/test_{losses,advantages}.py tests/inference/tiny/test_gpu.py; }
demo() { run demo 150 max_steps=$DEMO_STEPS; }
demo_seed2() { run demo-seed2 150 max_steps=$DEMO_STEPS seed=2; }
demo_sync() { run demo-sync 150 max_steps=$DEMO_STEPS rollout.max_head_offpolicyness=0; }
maze_async() { run maze-async 70 --config maze max_steps=$MAZE_STEPS; }
maze_sync() { run maze-sync 70 --config maze max_steps=$MAZE_STEPS rollout.max_head_offpolicyness=0; }
packed() { train packed 90 --check --profile; }
tree() { train tree 100 --tree --check; }
nockpt() { train nockpt 60 --no-checkpointing --mb-tokens 4096; }
eager() { train eager 90 --eager; }
long() { ROWS=8 LONGEST=30720 train long 120 --mb-tokens 30720; }
push() { model; cell push 60 "$PY" $CELLS push "$SHM/model-$SHAPE"; }
decode() { for s in $([ -n "$CPU" ] && echo tiny || echo 1.5b 135m); do SHAPE=$s model; cell "decode-$s" 45 "$PY" $CELLS decode "$SHM/model-$s"; done; }
gsm8k() { # gsm8k NAME LIMIT WORDS...: the recipe's step with a random model, whose reward is arithmetic
  local name=$1 limit=$2; shift 2; model
  PYTHONPATH=$PYTHONPATH:$PWD/bench/gpu run "$name" "$limit" --config gsm8k model_path="$SHM/model-$SHAPE" \
    {train,valid}_dataset.path=tests/data/gsm8k.jsonl workflow=workflow.RLVRWorkflow workflow_kwargs.reward_fn=cells.reward \
    max_steps=$STEPS eval_gconfig.n_samples=1 evaluator.interval=0 saver.interval=0 gconfig.n_samples=8 train_dataset.batch_size=$PROMPTS \
    gconfig.max_new_tokens=$((LONGEST / 4)) weight_update.path="$SHM/weights" "$@"; }
gsm8k_tiny() { gsm8k gsm8k-tiny 240 server.backend=tiny; } # the last step writes 25 GB: model and checkpoint
tool() { # the recipe of `make tool` with a random model of its shape
  local s=135m frozen=20; [ -n "$CPU" ] && s=tiny frozen=1
  SHAPE=$s model; run tool 90 --config tool model_path="$SHM/model-$s" actor.frozen_layers=$frozen max_steps=6; }
sglang() { # on the same GPU as the trainer; .sgl (prepare_sglang.sh) or an installation provides it
  if [ -d .sgl ]; then
    mkdir -p /tmp/sgl; cat .sgl/site.tar.xz.* | "$PY" -c \
      "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall('/tmp/sgl', filter='fully_trusted')" || return
    if [ -d .sgl/tvm-ffi ]; then cp -r .sgl/tvm-ffi /tmp/sgl/; fi; fi
  export POCKET_AREAL_SGLANG="env PATH=/tmp/sgl/ninja-1.13.2.data/scripts:$PATH PYTHONPATH=/tmp/sgl:$SITE SGLANG_IS_FLASHINFER_AVAILABLE=false TVM_FFI_CACHE_DIR=/tmp/sgl/tvm-ffi $PY -m sglang.launch_server"
  gsm8k sglang 190 server.backend=sglang server.max_total_tokens=131072 \
    'server.args=[--attention-backend,triton,--sampling-backend,pytorch,--grammar-backend,none,--disable-prefill-cuda-graph,--cuda-graph-max-bs-decode,128]'
  tail -n 5 "$WORK"/runs/gsm8k/sglang/logs/server-0.log; }
second() { sglang; nockpt; long; demo_seed2 & demo_sync & wait; }
first() { # first what no GPU has run yet; what the CPU bounds runs together, measurements run alone
  gsm8k_tiny; decode; tool
  unit & demo & { maze_async; maze_sync; } & wait
  packed; tree; eager; push; }

if [ -d .box ] && [ ! -f "$SITE/.ready" ]; then
  "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .box/whl/*.whl && touch "$SITE/.ready"
  mkdir -p .cache && cp -rn .box/cache/* .cache/ 2>/dev/null
  "$PY" -c 'import anthropic, openai, proxy' || exit 1 # without one of their wheels, every run would fail
fi
CARD=$([ -n "$CPU" ] || nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
TITLE="${CARD:-CPU}, $(date -u +%F), revision $(git describe --always --dirty 2>/dev/null), cells: ${*:-first}"
export TITLE; rm -f "$WORK/cells.jsonl"
info; for name in "${@:-first}"; do $name; done
"$PY" -m pip freeze >"$WORK/logs/pip.txt" 2>/dev/null
keep; echo "done after $(($(date +%s) - START)) s"; ls -la "$OUT"
