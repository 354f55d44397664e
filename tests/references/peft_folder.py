"""Opens an adapter with peft on its base, and compares the two with the model that they were merged to.

    python -m tests.references.peft_folder BASE ADAPTER MERGED    # needs torch, transformers and peft

Prints JSON: adapted, the modules with LoRA; error, |x - x'| / |x'| of the logits against MERGED's; moved, the
same of BASE's alone; and what peft warned of, deprecations apart.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from peft.tuners.lora import LoraLayer


def opened(folder: Path) -> transformers.PreTrainedModel:
    fields = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, fields["architectures"][0])
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def main() -> None:
    base, adapter, merged = map(Path, sys.argv[1:])
    model, want = opened(base), opened(merged)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (2, 19), generator=torch.Generator().manual_seed(0))
    alone, wanted = (x(input_ids=tokens, use_cache=False).logits for x in (model, want))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(model, adapter).eval()
    found = model(input_ids=tokens, use_cache=False).logits
    error, moved = (float((x - wanted).norm() / wanted.norm()) for x in (found, alone))
    adapted = sum(isinstance(module, LoraLayer) for module in model.modules())
    said = [str(x.message) for x in warned if not issubclass(x.category, (DeprecationWarning, FutureWarning))]
    print(json.dumps({"adapted": adapted, "error": error, "moved": moved, "warned": said}))


if __name__ == "__main__":
    main()
