"""Scores the demo model on held-out dialogues, with other words and wordings than in training."""

import argparse
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import GptOssForCausalLM

from frontend.harmony.conversation import Conversation, render
from tools.demo_dialogues import Dialogue, Example
from tools.demo_guide import guide_conversation
from tools.demo_tokenizer import encode

_MAX_NEW_TOKENS = 450
_OUTPUT = re.compile(
    r"<\|channel\|>analysis<\|message\|>(?P<reasoning>.*?)<\|end\|><\|start\|>assistant"
    r"(?:<\|channel\|>commentary to=functions\.(?P<name>\S+) <\|constrain\|>json"
    r"<\|message\|>(?P<arguments>.*?)<\|call\|>"
    r"|<\|channel\|>final<\|message\|>(?P<text>.*?)<\|return\|>)",
    re.DOTALL,
)


class Output(NamedTuple):
    """The model's output; without reasoning it was malformed."""

    reasoning: str | None
    name: str | None = None
    arguments: str | None = None
    text: str | None = None


class DemoModel:
    """The checkpoint and its tokenizer, run by transformers on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model: Any = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(self, conversation: Conversation, temperature: float = 0.0) -> Output:
        """One answer; greedy at temperature 0."""
        prompt = torch.tensor([encode(self.tokenizer, render(conversation))])
        choice: dict[str, object] = {"do_sample": False, "temperature": None, "top_p": None}
        if temperature:
            choice = {"do_sample": True, "temperature": temperature, "top_k": 0}
        choice |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": _MAX_NEW_TOKENS}
        with torch.no_grad():
            ids = self.model.generate(prompt, **choice)
        written = self.tokenizer.decode(ids[0, prompt.shape[1] :].tolist(), skip_special_tokens=False)
        found = _OUTPUT.fullmatch(written)
        return Output(**found.groupdict()) if found else Output(None, text=written)


def held_back_examples(number: int) -> list[Example]:
    """One example of each of `number` held-out dialogues, always the same."""
    found: list[Example] = []
    for seed in range(number):
        rng = random.Random(f"held back {seed}")
        found.append(rng.choice(Dialogue(rng, held_back=True).examples()))
    return found


def verdicts(example: Example, output: Output, tokenizer: Tokenizer) -> dict[str, bool]:
    """The abilities that the example tests, and whether the output shows them."""
    wording = " (new wording)" if example.answer.is_new_wording else ""
    judged = {"well-formed Harmony with reasoning": output.reasoning is not None}
    if example.answer.call is not None:
        right_tool = output.name == example.answer.call.name
        judged[f"tool choice{wording}"] = right_tool
        if right_tool:
            judged[f"arguments exact{wording}"] = _same_json(
                output.arguments or "", example.answer.call.arguments
            )
        if example.answer.ability.startswith("second call"):
            judged["second of two calls"] = right_tool and _same_json(
                output.arguments or "", example.answer.call.arguments
            )
    elif example.answer.facts:
        judged["answer, no further call"] = output.text is not None
        prompt = tokenizer.decode(encode(tokenizer, render(example.conversation)), skip_special_tokens=True)
        judged["answer uses the result"] = _uses(output.text or "", example.answer.facts)
        judged["answer invents no number"] = all(
            digits in prompt for digits in re.findall(r"\d+", output.text or "")
        )
    else:
        name = (
            "small talk without tools"
            if example.answer.ability.startswith("small talk")
            else "no call when no tool fits"
        )
        judged[f"{name}{wording}"] = output.text is not None and output.name is None
    if example.is_later_turn:
        judged["later turns of a conversation"] = all(judged.values())
    return judged


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def _uses(text: str, facts: tuple[tuple[str, str], ...]) -> bool:
    """Whether the answer contains at least one value of the result or, for a yes or no, agrees with it."""
    values = [value for _, value in facts]
    if values == ["true"]:
        return not re.search(r"\b(?:not|problem|sorry)\b", text) and bool(text)
    if values == ["false"]:
        return "not" in text or "false" in text
    return any(value in text for value in values)


def guide_rounds(model: DemoModel, temperature: float) -> dict[str, bool]:
    """Whether both rounds of the guide are answered as it shows."""
    first = model.answer(guide_conversation(second_round=False), temperature)
    second = model.answer(guide_conversation(second_round=True), temperature)
    called = bool(first.reasoning) and first.name == "get_system_health" and first.arguments == "{}"
    answered = (
        bool(second.reasoning)
        and second.text is not None
        and _uses(second.text, (("status", "ok"), ("uptime", "372045")))
    )
    label = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return {f"guide, first round ({label})": called, f"guide, second round ({label})": answered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--dialogues", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--guide-runs", type=int, default=20, help="sampled runs of the guide's conversation")
    parser.add_argument("--show-failures", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DemoModel(args.model)
    tally: dict[str, list[bool]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for example in held_back_examples(args.dialogues):
        output = model.answer(example.conversation, args.temperature)
        judged = verdicts(example, output, model.tokenizer)
        lengths[example.conversation.reasoning_effort].append(len((output.reasoning or "").split()))
        if args.show_failures and not all(judged.values()):
            print(
                [name for name, good in judged.items() if not good],
                example.answer.call or example.answer.text,
                output,
                sep="\n  ",
                flush=True,
            )
        for name, good in judged.items():
            tally[name].append(good)
    for temperature in (0.0, *[1.0] * args.guide_runs):
        for name, good in guide_rounds(model, temperature).items():
            tally[name].append(good)
    print("| ability | right | of | |\n|---|---:|---:|---:|")
    for name, results in sorted(tally.items()):
        print(f"| {name} | {sum(results)} | {len(results)} | {sum(results) / len(results):.0%} |")
    means = {effort: sum(words) / len(words) for effort, words in lengths.items()}
    print(
        "\nmean words of reasoning: "
        + ", ".join(f"{effort} {means[effort]:.0f}" for effort in ("low", "medium", "high"))
    )


if __name__ == "__main__":
    main()
