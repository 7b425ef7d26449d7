"""The Python parts of bench/gpu_check.sh: make a model with random weights, compute rewards, and write docs/gpu.md.

    python bench/gpu_check.py model DIR --shape 0.6b
    python bench/gpu_check.py report WORK > docs/gpu.md

For every mode of the weight update, the check compares the log-probabilities that the server and the trainer compute.
It also measures the time and the memory of a step. The runs do not test learning: the model has random weights.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHAPES = {  # layers, width, inner width, heads, key-value heads, width of a head, vocabulary
    "0.6b": (28, 1024, 3072, 16, 8, 128, 151936),  # Qwen3-0.6B
    "tiny": (2, 64, 128, 4, 2, 16, 512),  # for trying the script on a CPU
}
MISMATCH = {
    "0.6b": 0.2,
    "tiny": 0.05,
}  # largest allowed mismatch in nats; bf16 rounds a log-probability near 12 nats to a multiple of 0.06
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **_) -> float:
    """Return the share of odd token ids as the reward. The share differs between samples, so there are gradients."""
    return sum(i % 2 for i in completion_ids) / max(1, len(completion_ids))


def make_model(path: Path, shape: str) -> None:
    """Write a Qwen3 with random weights and one token per byte. Most token ids stand for no text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    raw = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    layers, width, inner, heads, kv_heads, head, vocabulary = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16" if shape != "tiny" else "float32",
    )
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).to(config.dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)


def row(folder: Path, bound: float) -> list[str]:
    """Return the table row of one run. The means leave out the first step, which is slower."""
    name = folder.name
    metrics = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    code = (folder / "code").read_text().strip()
    if code != "0" or len(lines) < 2:
        words = [w for w in (folder / "log").read_text(errors="replace").splitlines() if w.strip()] or ["no output"]
        return [name, f"failed: {words[-1][:100]}", *["-"] * 8]
    worst = max(line["logp_mismatch"] for line in lines)
    warm = lines[1:]

    def mean(key: str) -> float:
        return sum(line[key] for line in warm) / len(warm)

    plan = (folder / "plan").read_text()
    server = "SGLang" if "sglang" in plan else "inference/tiny/server.py"
    memory = folder / "memory"
    used = [int(word) for word in memory.read_text().split() if word.isdigit()] if memory.exists() else []
    numbers = [f"{mean('tokens') / mean('step_s'):.0f}"]
    numbers += [f"{mean(key):.2f}" for key in ("step_s", "rollout_wait_s", "train_s", "sync_s")]
    numbers += [f"{max(used) / 1024:.1f}" if used else "-", f"{worst:.1e}"]
    return [name, "ok" if worst <= bound else f"mismatch above {bound}", server, *numbers]


def report(work: Path) -> str:
    """Return the text of docs/gpu.md."""
    import torch

    shape = (work / "shape").read_text().strip()
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    where = (
        ", ".join(gpus)
        if gpus
        else f"no GPU ({platform.machine()}, {os.cpu_count()} cores): a check of the script, not a result"
    )
    head = ["cell", "", "server", "tokens/s", "step s", "wait s", "train s", "sync s", "peak GiB", "mismatch"]
    rows = [row(folder, MISMATCH[shape]) for folder in sorted(work.glob("cell-*"))]
    table = [head, ["---"] * len(head), *rows]
    text = [
        "# On a GPU",
        "",
        f"Written by `bench/gpu_check.sh`; every number was measured on: {where}. torch {torch.__version__}, shape {shape},",
        "random weights. tokens/s is the number of trained tokens, divided by the time of a step. The peak is the memory in",
        "use on the fullest GPU. The mismatch is the largest difference between the log-probabilities of a token that the",
        "server and the trainer compute under the same weights.",
        "",
        *("| " + " | ".join(line) + " |" for line in table),
        "",
    ]
    for check in sorted(work.glob("check-*")):
        lines = check.read_text(errors="replace").strip().splitlines() or ["no output"]
        text += [f"{check.name.removeprefix('check-')}: `{lines[-1][:150]}`", ""]
    return "\n".join(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "report"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    args = parser.parse_args()
    if args.what == "model":
        make_model(args.path, args.shape)
    else:
        print(report(args.path), end="")
