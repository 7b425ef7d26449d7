#!/usr/bin/env bash
# Makes .sgl, 31 MiB: SGLang 0.5.17, the newest for torch 2.11, with what one H100 needs:   bash bench/gpu/prepare_sglang.sh
# Left out: FlashAttention 3 (342 of the kernels' 383 MB), kernels of other cards, flashinfer and xgrammar (a stand-in answers
# their imports), torchao, harmony, cutlass, deep-gemm, tilelang, datasets, images and video. So the server is started with
# --attention-backend triton --sampling-backend pytorch --grammar-backend none (box.sh, cell sglang). Downloads 0.5 GB.
# Tried: the server on a CPU with transformers 5.17 and this engine. Not tried: any of its kernels on a GPU.
set -eu
cd "$(dirname "$0")/../.."
grep -qxF '/.sgl/' .git/info/exclude 2>/dev/null || echo '/.sgl/' >>"$(git rev-parse --git-path info/exclude)"
work=${WHEELS:-/tmp/sgl_wheels}; mkdir -p "$work" .sgl
names="sglang==0.5.17 sglang-kernel==0.4.5 apache-tvm-ffi==0.1.11 ninja==1.13.2
 torch_memory_saver==0.0.10 openai==2.8.0 jiter==0.19.0 compressed-tensors==0.18.0 dill==0.4.1 distro==1.9.0 gguf==0.19.0
 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 loguru==0.7.3 msgspec==0.22.0
 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 cffi==2.1.1 pycparser==3.12 python-multipart==0.0.34 pyzmq==27.3.0
 setproctitle==1.3.8 soundfile==0.14.0 watchfiles==1.3.0 interegular==0.3.3 zstandard==0.25.0 ipython==9.18.1
 ipython_pygments_lexers==1.1.1 traitlets==5.16.1 jedi==0.20.1 parso==0.8.7 decorator prompt_toolkit==3.0.53 wcwidth==0.9.4
 stack-data==0.6.3 executing==2.3.0 asttokens==3.0.2 pure_eval==0.2.4 matplotlib-inline==0.2.2 pexpect==4.9.0 ptyprocess==0.7.0"
for name in $names; do
  base=$(echo "${name%%==*}" | tr '-' '_'); ls "$work"/"$base"-*.whl >/dev/null 2>&1 && continue
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
    --abi cp39 --abi none $(for n in 39 38 37 36 35 34 31 28 27 26 24 17 12 5; do echo --platform manylinux_2_${n}_x86_64; done) \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any -d "$work" "$name"
done
site=$(mktemp -d); trap 'rm -rf "$site"' EXIT
for wheel in "$work"/*.whl; do
  case $(basename "$wheel") in torchao-* | xgrammar-* | openai_harmony-*) continue ;; esac
  unzip -q -o "$wheel" -d "$site" -x 'sgl_kernel/flash_ops*' 'sgl_kernel/sm100/*' 'sgl_kernel/infllm_ops*' 'sgl_kernel/flashmla_ops*' \
    'sglang/multimodal_gen/*' 'sglang/test/*' 'sglang/srt/server/_core*' 'sglang/srt/grpc/_core*' 'jedi/third_party/*' \
    'sgl_kernel/testing/*' '*.pyi' 2>/dev/null || [ $? = 11 ]
done
for name in flashinfer xgrammar; do mkdir -p "$site/$name"; cp bench/gpu/stand_in.py "$site/$name/__init__.py"; done
# transformers 5.17 has models of its own under names that SGLang registers (qwen3_asr), and refuses a second one.
sed -Ei '/exist_ok/!s/^( *(Auto[A-Za-z]+|CONFIG_MAPPING)\.register\(.*[^(])\)$/\1, exist_ok=True)/' "$site"/sglang/srt/configs/*.py
# /pause_generation in mode abort repeats its abort every second, and so also marks requests that came meanwhile and wait for
# /continue_generation: they would end with status 499, which the engine takes for a wrong request.
sed -i 's/^                if state_rid not in self.child_rid_to_logical_rid:$/                if not self.is_pause and state_rid not in self.child_rid_to_logical_rid:/' \
  "$site"/sglang/srt/managers/tokenizer_manager.py
grep -q 'if not self.is_pause and' "$site"/sglang/srt/managers/tokenizer_manager.py || { echo "the patch found no line"; exit 1; }
rm -rf .sgl/*
tar -C "$site" -cf - . | xz -6 -T2 | split -b 48m - .sgl/site.tar.xz.
du -sm .sgl/*
