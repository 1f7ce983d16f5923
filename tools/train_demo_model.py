"""Trains the demo model on synthetic Harmony dialogues: minutes on one GPU; needs torch and transformers."""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, GptOssForCausalLM

from tools.demo_batches import Batch, batches
from tools.demo_network import Masks, demo_config, document_masks, hidden_states
from tools.demo_tokenizer import save as save_tokenizer

_BALANCE_WEIGHT = 0.01
Forward = Callable[[GptOssForCausalLM, torch.Tensor, torch.Tensor, Masks], tuple[torch.Tensor, torch.Tensor]]


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up in the first 2 % of the time, then cosine decay to a hundredth."""
    if progress < 0.02:
        return peak * progress / 0.02
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def loss_of(
    forward: Forward, model: GptOssForCausalLM, batch: Batch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy over the assistant's tokens, and the router's balance loss."""
    ids, targets, positions, documents = (torch.from_numpy(part).to(device, torch.long) for part in batch)
    masks = document_masks(documents)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        states, balance = forward(model, ids, positions, masks)
        taught = targets != -100
        logits = model.lm_head(states[taught])
    return functional.cross_entropy(logits.float(), targets[taught]), balance / len(model.model.layers)


def optimizer_of(model: GptOssForCausalLM) -> torch.optim.AdamW:
    """Weight decay for matrices, none for biases, norms, sinks and embeddings."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    decayed = [w for name, w in named if w.ndim >= 2 and "bias" not in name and "embed" not in name]
    kept = [w for name, w in named if w.ndim < 2 or "bias" in name or "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10)


def train(model: GptOssForCausalLM, args: argparse.Namespace, source: Iterator[Batch]) -> None:
    """Train for `args.minutes` after the first step, which compiles."""
    device = next(model.parameters()).device
    model.train()
    optimizer = optimizer_of(model)
    forward = torch.compile(hidden_states, dynamic=False) if device.type == "cuda" else hidden_states
    started_s = time.monotonic()
    for step, batch in enumerate(source):
        progress = (time.monotonic() - started_s) / (args.minutes * 60) if step else 0.0
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, args.peak_rate)
        loss, balance = loss_of(forward, model, batch, device)
        torch.autograd.backward(loss + _BALANCE_WEIGHT * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            started_s = time.monotonic()
        if step % args.log_every == 0:
            elapsed_s = time.monotonic() - started_s
            print(
                f"step={step} loss={loss.item():.4f} balance={balance.item():.2f} s={elapsed_s:.0f}",
                flush=True,
            )


def save(model: GptOssForCausalLM, tokenizer: Tokenizer, folder: Path, sharpen: float) -> None:
    """Write the Hugging Face folder in bfloat16; `sharpen` scales the logits to lower the effective
    temperature."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpen)
    model = model.cpu().bfloat16()
    model.config.dtype = "bfloat16"
    stops = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id}
    model.generation_config = GenerationConfig.from_dict({"do_sample": True, "temperature": 1.0, **stops})
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="training time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14, help="processes that generate dialogues")
    parser.add_argument("--rows", type=int, default=32, help="rows of 2048 tokens in a batch")
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--sharpen", type=float, default=1.0, help="scale of the logits on disk")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/demo/tokenizer.json"))
    parser.add_argument("--start-from", type=Path, help="start from these weights instead of random ones")
    parser.add_argument("--out", type=Path, default=Path("models/demo"))
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    model: Any = GptOssForCausalLM(demo_config(tokenizer))
    if args.start_from is not None:
        model = GptOssForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
    print(f"weights: {sum(w.numel() for w in model.parameters()):,}")
    if torch.cuda.is_available():
        model = model.cuda()
    train(model, args, batches(args.tokenizer, seed=args.seed, num_workers=args.workers, num_rows=args.rows))
    save(model, tokenizer, args.out, args.sharpen)


if __name__ == "__main__":
    main()
