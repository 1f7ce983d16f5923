"""Synthetic Harmony dialogues: prompts as Baton renders them, with the answers to learn."""

import functools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Instructions,
    ReasoningEffort,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.text.tokenizer import Segment, SpecialToken
from tools.demo_families import confusable, families, invented_family
from tools.demo_outcomes import Outcome, random_outcome
from tools.demo_reasoning import Facts, Thinker
from tools.demo_requests import Request, in_a_tone, random_pair, random_request
from tools.demo_toolbox import Offer, random_offer
from tools.demo_words import CAPITALS, COUNTRIES, NAMES, NOUNS, Words

_JOINTS = [" And ", " Also, ", " Then ", "\n", " And then: ", " Next, "]


class Answer(NamedTuple):
    """One turn of the assistant: a call or a text. `facts` are what a text must use."""

    reasoning: str
    call: ToolCall | None
    text: str | None
    ability: str
    facts: Facts = ()
    is_new_wording: bool = False


class Example(NamedTuple):
    """One answer to learn, with the conversation before it."""

    conversation: Conversation
    answer: Answer
    is_later_turn: bool


Script = list[Answer | UserTurn | ToolResult]


def completion(answer: Answer) -> list[Segment]:
    """What the model writes after `<|start|>assistant`, with header words in its order."""
    special = SpecialToken
    thought: list[Segment] = [special.CHANNEL, "analysis", special.MESSAGE, answer.reasoning, special.END]
    head: list[Segment] = [*thought, special.START, "assistant", special.CHANNEL]
    if answer.call is None:
        return [*head, "final", special.MESSAGE, answer.text or "", special.RETURN]
    recipient = f"commentary to=functions.{answer.call.name} "
    return [*head, recipient, special.CONSTRAIN, "json", special.MESSAGE, answer.call.arguments, special.CALL]


@functools.cache
def _small_talk() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("demo_smalltalk.yaml").read_text())
    return loaded


class Dialogue:
    """One random conversation: its setting (tools, effort, instructions) and its turns."""

    def __init__(self, rng: random.Random, *, held_back: bool = False) -> None:
        self.rng = rng
        self.words = Words(rng, held_back=held_back)
        self.effort: ReasoningEffort = rng.choice(["low", "medium", "high"])
        # The prefix and suffix that an instruction demands of every answer.
        self.frame = "{}"
        self.instructions = self._instructions()
        self.offers = self._offers()
        self.thinker = Thinker(rng, self.effort, tuple(offer.tool.name for offer in self.offers))
        self.num_calls = 0

    def examples(self) -> list[Example]:
        """The answers of the last episode, each with the conversation before it."""
        rng = self.rng
        asked: Request | None = None
        episodes: list[Script] = []
        for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4))):
            episode, asked = self._episode(asked)
            episodes.append(episode)
        earlier = [item for episode in episodes[:-1] for item in episode]
        turns, sends_reasoning = self._history(earlier, rng.random() < 0.5), rng.random() < 0.5
        found = []
        for position, item in enumerate(episodes[-1]):
            if isinstance(item, Answer):
                said = self._history(episodes[-1][:position], sends_reasoning)
                found.append(Example(self._conversation(turns + said), self._framed(item), bool(earlier)))
        return found

    def _conversation(self, turns: list[Turn]) -> Conversation:
        rng = self.rng
        date = f"{rng.randint(2024, 2027)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        return Conversation(
            turns=(*self.instructions, *turns),
            tools=tuple(offer.tool for offer in self.offers),
            reasoning_effort=self.effort,
            current_date=date if rng.random() < 0.9 else None,
        )

    def _framed(self, answer: Answer) -> Answer:
        return answer if answer.text is None else answer._replace(text=self.frame.format(answer.text))

    def _history(self, script: Script, sends_reasoning: bool) -> list[Turn]:
        return [
            self._turn(self._framed(item), sends_reasoning) if isinstance(item, Answer) else item
            for item in script
        ]

    def _turn(self, answer: Answer, sends_reasoning: bool) -> AssistantTurn:
        reasoning = answer.reasoning if sends_reasoning else None
        calls = (answer.call,) if answer.call else ()
        return AssistantTurn(reasoning=reasoning, text=answer.text, tool_calls=calls)

    def _instructions(self) -> list[Instructions]:
        rng = self.rng
        if rng.random() < 0.55:
            return []
        lines: list[str] = rng.sample(_small_talk()["instructions"], rng.choice((1, 1, 2, 3)))
        if rng.random() < 0.1:
            lines += [f"{self.words.sentence()}." for _ in range(rng.randint(2, 8))]
        if rng.random() < 0.3:
            word = rng.choice([self.words.phrase(), self.words.pick(NAMES)])
            rule, frame = rng.choice(_small_talk()["rules"])
            self.frame = frame.replace("WORD", word)
            lines.insert(rng.randint(0, len(lines)), rule.replace("WORD", word))
        return [Instructions(text=rng.choice([" ", "\n"]).join(lines))]

    def _offers(self) -> list[Offer]:
        """Up to six tools of families that cannot be confused."""
        rng = self.rng
        offers: dict[str, Offer] = {}
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4, 5, 6))):
            kind = rng.random()
            if kind < 0.3:
                family = invented_family(self.words)
            else:
                family = families()[0] if kind < 0.42 else rng.choice(families())
            offer = random_offer(self.words, family)
            if not any(confusable(family, other.family) for other in offers.values()):
                offers.setdefault(offer.tool.name, offer)
        return list(offers.values())

    def _episode(self, before: Request | None) -> tuple[Script, Request | None]:
        """The turns for one user message; `before` is the previous message's request, if any."""
        rng, kind = self.rng, self.rng.random()
        if not self.offers or kind < 0.17:
            return (self._missing_tool() if rng.random() < 0.15 else self._chat()), None
        if kind < 0.2:
            return self._missing_tool(), None
        if before is not None and rng.random() < 0.5:
            asked = random_request(self.words, before.offer, follow_up=True)
            return self._tool_use([asked], asked.text), asked
        first = random_request(self.words, rng.choice(self.offers))
        with_arguments = [offer for offer in self.offers if offer.names]
        if kind < 0.26 and with_arguments:
            one, other, text = random_pair(self.words, rng.choice(with_arguments))
            return self._tool_use([one, other], text), other
        others = [offer for offer in self.offers if offer.names or offer is not first.offer]
        if kind < 0.34 and others:
            second = random_request(self.words, rng.choice(others))
            return self._tool_use([first, second], first.text + rng.choice(_JOINTS) + second.text), second
        return self._tool_use([first], first.text), first

    def _tool_use(self, requests: list[Request], text: str) -> Script:
        script: Script = [UserTurn(text=text)]
        outcomes: list[Outcome] = []
        for number, asked in enumerate(requests):
            self.num_calls += 1
            arguments = json.dumps(asked.arguments, separators=(",", ":"), ensure_ascii=False)
            call = ToolCall(call_id=f"call_{self.num_calls}", name=asked.offer.tool.name, arguments=arguments)
            thought = self.thinker.about_call(asked, text, is_next=number > 0)
            ability = ("tool call", "second call")[number]
            script.append(Answer(thought, call, None, ability, is_new_wording=asked.is_new_wording))
            outcomes.append(random_outcome(self.words, asked))
            script.append(ToolResult(call_id=call.call_id, text=outcomes[-1].text))
        facts = tuple(fact for outcome in outcomes for fact in outcome.facts)
        answer = " ".join(outcome.answer for outcome in outcomes)
        thought = self.thinker.about_result(requests, facts, text)
        script.append(Answer(thought, None, answer, "answer from result", facts))
        return script

    def _chat(self) -> Script:
        """A message that needs no tool."""
        rng = self.rng
        entry = rng.choice([e for e in _small_talk()["entries"] for _ in range(e.get("weight", 1))])
        asks = entry["asks"]
        is_new = self.words.held_back and len(asks) > 3 and rng.random() < 0.5
        ask = asks[-1] if is_new else rng.choice(asks[:-1] if len(asks) > 3 else asks)
        slots = self._slots()
        said = {key: value if "{" + key + "}" in ask else "" for key, value in slots.items()}
        said["capital"] = slots["capital"]
        said["tools"] = ", ".join(self.thinker.offered) or "none today, only small talk"
        text = (in_a_tone(rng, ask) if len(ask) <= 30 and rng.random() < 0.5 else ask).format(**slots)
        answer = rng.choice(entry["answers"]).format(**said)
        thought = self.thinker.about_small_talk(entry["about"], text)
        return [UserTurn(text=text), Answer(thought, None, answer, "small talk", (), is_new)]

    def _slots(self) -> dict[str, str]:
        words, country = self.words, self.rng.choice(COUNTRIES)
        return {
            "name": words.pick(NAMES),
            "phrase": words.phrase(),
            "sentence": words.sentence(),
            "noun": words.pick(NOUNS),
            "country": country,
            "capital": CAPITALS[country],
        }

    def _missing_tool(self) -> Script:
        """A request that no offered tool can fulfil."""
        rng, words = self.rng, self.words
        strangers = [f for f in families() if not any(confusable(f, o.family) for o in self.offers)]
        family = invented_family(words) if rng.random() < 0.2 else rng.choice(strangers)
        asked = random_request(words, random_offer(words, family))
        answer = rng.choice(_small_talk()["excuses"])
        if self.offers:
            answer += rng.choice(["", f" I can use {', '.join(self.thinker.offered)}."])
        thought = self.thinker.about_missing_tool(asked)
        return [UserTurn(text=asked.text), Answer(thought, None, answer, "no tool", (), asked.is_new_wording)]
