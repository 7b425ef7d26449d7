#!/usr/bin/env bash
# Collects in .box what a GPU machine without network lacks:   bash bench/gpu/prepare.sh [NAME==VERSION ...]
# Such a machine has torch, transformers, httpx, uvloop and pytest; the rest is 14 MiB of wheels.
# Then copy the checkout with .box there, and run `bash bench/gpu/box.sh` in it.
set -eu
cd "$(dirname "$0")/../.."
grep -qxF '/.box/' .git/info/exclude 2>/dev/null || echo '/.box/' >>"$(git rev-parse --git-path info/exclude)"
names=${*:-"fastapi starlette uvicorn httptools orjson openai jiter sniffio pydantic pydantic_core
  annotated-types typing-inspection anthropic docstring_parser typing_extensions anyio idna rich h11
  aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl
  httpx2 httpcore2 truststore opentelemetry-api"}
mkdir -p .box/whl .box/cache
for name in $names; do
  version=$(grep -iE "^${name//_/[-_]}==" constraints.txt || true)
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 -d .box/whl "${version:-$name}"
done
# The base models of the demo and the maze take minutes to make: if each has run for one step here, they travel along.
for model in .cache/tasks.*; do [ -d "$model" ] && cp -r "$model" .box/cache/; done
du -sh .box
