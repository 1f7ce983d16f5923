"""Synthetic Harmony dialogues: a prompt as Baton renders it, and the answer the demo model shall learn."""

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
from frontend.harmony.specials import Segment, SpecialToken
from tools.demo_toolbox import (
    Offer,
    Outcome,
    Request,
    confusable,
    families,
    generic_family,
    offer,
    outcome,
    request,
    request_pair,
    style,
)
from tools.demo_words import CAPITALS, COUNTRIES, NAMES, NOUNS, Words

_NEUTRAL = ["You are a helpful assistant.", "Be concise.", "Answer politely.", "Use the tools when they help.", "Be kind and brief.",
            "You are an operations assistant.", "Never guess.", "Always respond in English.", "Only call a tool if you need it.",
            "You are a friendly bot for our customers.", "Think before you answer.", "Do not make things up.",
            "If a tool fails, say so.", "You help engineers to run a cluster.", "Today is a good day."]  # fmt: skip
_JOINTS = [" And ", " Also, ", " Then ", "\n", " And then: ", " Next, "]


class Example(NamedTuple):
    """One answer to learn: the prompt, the reasoning, and either a call or a text. `facts` are what a text must use."""

    conversation: Conversation
    reasoning: str
    call: ToolCall | None
    text: str | None
    ability: str
    facts: tuple[tuple[str, str], ...] = ()
    is_new_wording: bool = False


class Answer(NamedTuple):
    """An assistant turn with its label, before it is known whether it is history or the one to learn."""

    reasoning: str
    call: ToolCall | None
    text: str | None
    ability: str
    facts: tuple[tuple[str, str], ...] = ()
    is_new_wording: bool = False


Script = list[Answer | UserTurn | ToolResult]


def completion(example: Example) -> list[Segment]:
    """What the model writes after `<|start|>assistant`, in its own order of header words."""
    special = SpecialToken
    head: list[Segment] = [
        special.CHANNEL,
        "analysis",
        special.MESSAGE,
        example.reasoning,
        special.END,
        special.START,
        "assistant",
    ]
    if example.call is not None:
        header = f"commentary to=functions.{example.call.name} "
        return [
            *head,
            special.CHANNEL,
            header,
            special.CONSTRAIN,
            "json",
            special.MESSAGE,
            example.call.arguments,
            special.CALL,
        ]
    return [*head, special.CHANNEL, "final", special.MESSAGE, example.text or "", special.RETURN]


@functools.cache
def small_talk() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("demo_smalltalk.yaml").read_text()
    )
    return [entry for entry in entries for _ in range(entry.get("weight", 1))]


class Dialogue:
    """One random conversation: its setting (tools, effort, instructions) and what is said in it."""

    def __init__(self, rng: random.Random, *, held_back: bool = False) -> None:
        self.rng = rng
        self.words = Words(rng, held_back=held_back)
        self.effort: ReasoningEffort = rng.choice(["low", "medium", "high"])
        self.frame = "{}"
        self.instructions = self._instructions()
        self.offers: list[Offer] = []
        self.num_calls = 0

    def examples(self) -> list[Example]:
        """The answers of the last episode, each with the prompt that leads to it."""
        rng = self.rng
        self._set_table()
        script: Script = []
        asked: Request | None = None
        num_episodes = rng.choice((1, 1, 1, 1, 2, 2, 3, 4))
        for i in range(num_episodes):
            episode, asked = self._episode(asked)
            if i < num_episodes - 1:
                script += episode
        turns, sends_reasoning = self._as_history(script, rng.random() < 0.5), rng.random() < 0.5
        found = []
        for position, item in enumerate(episode):
            if isinstance(item, Answer):
                said = self._as_history(episode[:position], sends_reasoning)
                found.append(self._example(turns + said, item, follows=num_episodes > 1))
        return found

    def _example(self, turns: list[Turn], answer: Answer, *, follows: bool) -> Example:
        rng = self.rng
        date = f"{rng.randint(2024, 2027)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        conversation = Conversation(
            turns=(*self.instructions, *turns),
            tools=tuple(offered.tool for offered in self.offers),
            reasoning_effort=self.effort,
            current_date=date if rng.random() < 0.9 else None,
        )
        text = self.frame.format(answer.text) if answer.text is not None else None
        ability = f"{answer.ability}, later turn" if follows else answer.ability
        return Example(
            conversation, answer.reasoning, answer.call, text, ability, answer.facts, answer.is_new_wording
        )

    def _as_history(self, script: Script, sends_reasoning: bool) -> list[Turn]:
        turns: list[Turn] = []
        for item in script:
            if not isinstance(item, Answer):
                turns.append(item)
                continue
            reasoning = item.reasoning if sends_reasoning else None
            text = self.frame.format(item.text) if item.text is not None else None
            turns.append(
                AssistantTurn(reasoning=reasoning, text=text, tool_calls=(item.call,) if item.call else ())
            )
        return turns

    def _instructions(self) -> list[Instructions]:
        rng = self.rng
        if rng.random() < 0.55:
            return []
        lines = rng.sample(_NEUTRAL, rng.choice((1, 1, 2, 3)))
        if rng.random() < 0.1:
            lines += [f"{self.words.sentence()}." for _ in range(rng.randint(2, 8))]
        if rng.random() < 0.3:
            word = rng.choice([self.words.phrase(), self.words.pick(NAMES)])
            rule, self.frame = rng.choice([
                (f"End every answer with: {word}", f"{{}} {word}"), (f"Start every answer with: {word}", f"{word} {{}}"),
                (f'Finish each answer with "{word}"', f"{{}} {word}"), (f"Call the user {word}.", f"{word}, {{}}"),
            ])  # fmt: skip
            lines.insert(rng.randint(0, len(lines)), rule)
        return [Instructions(text=rng.choice([" ", "\n"]).join(lines))]

    def _set_table(self) -> None:
        """Offers one to six tools (or none) of families that cannot be mistaken for each other."""
        rng = self.rng
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4, 5, 6))):
            kind = rng.random()
            family = (
                generic_family(self.words)
                if kind < 0.3
                else families()[0]
                if kind < 0.42
                else rng.choice(families())
            )
            candidate = offer(self.words, family)
            names = {offered.tool.name for offered in self.offers}
            if candidate.tool.name not in names and not any(
                confusable(family, offered.family) for offered in self.offers
            ):
                self.offers.append(candidate)

    def _episode(self, before: Request | None) -> tuple[Script, Request | None]:
        rng, kind = self.rng, self.rng.random()
        if not self.offers or kind < 0.17:
            return (self._missing_tool() if rng.random() < 0.2 else self._small_talk()), None
        if kind < 0.22:
            return self._missing_tool(), None
        if before is not None and rng.random() < 0.5:
            asked = request(self.words, before.offer, follow_up=True)
            return self._tool_use([asked], asked.text), asked
        first = request(self.words, rng.choice(self.offers))
        askable = [item for item in self.offers if item.names]
        if kind < 0.28 and askable:
            one, other, text = request_pair(self.words, rng.choice(askable))
            return self._tool_use([one, other], text), other
        others = [item for item in self.offers if item.names or item is not first.offer]
        if kind < 0.36 and others:
            second = request(self.words, rng.choice(others))
            return self._tool_use([first, second], first.text + rng.choice(_JOINTS) + second.text), second
        return self._tool_use([first], first.text), first

    def _tool_use(self, requests: list[Request], text: str) -> Script:
        script: Script = [UserTurn(text=text)]
        outcomes: list[Outcome] = []
        for number, asked in enumerate(requests):
            self.num_calls += 1
            arguments = json.dumps(asked.arguments, separators=(",", ":"), ensure_ascii=False)
            call = ToolCall(call_id=f"call_{self.num_calls}", name=asked.offer.tool.name, arguments=arguments)
            label = ("tool call", "second call")[number]
            script.append(
                Answer(self._think_call(asked, text, number), call, None, label, (), asked.is_new_wording)
            )
            outcomes.append(outcome(self.words, asked))
            script.append(ToolResult(call_id=call.call_id, text=outcomes[-1].text))
        facts = tuple(fact for result in outcomes for fact in result.facts)
        answer = " ".join(result.answer for result in outcomes)
        script.append(
            Answer(self._think_answer(requests, facts, text), None, answer, "answer from result", facts)
        )
        return script

    def _think_call(self, asked: Request, text: str, number: int) -> str:
        rng, name, goal = self.rng, asked.offer.tool.name, asked.goal
        pairs = [
            f"{key} is {value if isinstance(value, str) else json.dumps(value)}"
            for key, value in asked.arguments.items()
        ]
        arguments = f"Arguments: {', '.join(pairs)}." if pairs else "It takes no arguments."
        if self.effort == "low":
            start = "Next we need" if number else rng.choice(["We need", "The user wants", "Need"])
            return f"{start} {goal}. {rng.choice(['Use', 'Call'])} {name}."
        wish = f"{'Next the' if number else 'The'} user wants {goal}. {rng.choice(['The tool', 'The function'])} {name} does that."
        if self.effort == "medium":
            return f"{wish} {arguments}"
        offered = ", ".join(item.tool.name for item in self.offers)
        return (
            f'The user says: "{text}" The tools on offer are: {offered}. {wish} {arguments} '
            f"I call {name} now, wait for its result, and then I answer with what it returns."
        )

    def _think_answer(self, requests: list[Request], facts: tuple[tuple[str, str], ...], text: str) -> str:
        limit = {"low": 2, "medium": 4, "high": 8}[self.effort]
        listed = ", ".join(f"{name} {value}" for name, value in facts[:limit])
        if self.effort == "low":
            return f"{self.rng.choice(['The tool returned', 'We have the result:', 'The result is'])} {listed}. Answer briefly."
        goals = " and ".join(asked.goal for asked in requests)
        if self.effort == "medium":
            return f"The user wanted {goals}. The result is {listed}. Now I can answer."
        names = " and ".join(dict.fromkeys(asked.offer.tool.name for asked in requests))
        return (
            f'The user said: "{text}" They wanted {goals}. I called {names}, and the result is {listed}. '
            "That is all I need, no other call is needed. I answer in plain words and use these values."
        )

    def _small_talk(self) -> Script:
        rng = self.rng
        entry = rng.choice(small_talk())
        asks = entry["asks"]
        new_wording = self.words.held_back and len(asks) > 3 and rng.random() < 0.5
        ask = asks[-1] if new_wording else rng.choice(asks[:-1] if len(asks) > 3 else asks)
        country = rng.choice(COUNTRIES)
        slots = {"name": self.words.pick(NAMES), "phrase": self.words.phrase(), "sentence": self.words.sentence(),
                 "noun": self.words.pick(NOUNS), "country": country, "capital": CAPITALS[country]}  # fmt: skip
        said = {
            key: value if "{" + key + "}" in ask or key == "capital" else "" for key, value in slots.items()
        }
        tools = ", ".join(item.tool.name for item in self.offers) or "none today, only small talk"
        text = (ask if len(ask) > 30 else style(rng, ask) if rng.random() < 0.5 else ask).format(**slots)
        answer = rng.choice(entry["answers"]).format(**said, tools=tools)
        return [
            UserTurn(text=text),
            Answer(self._think_plain(entry["about"], text), None, answer, "small talk", (), new_wording),
        ]

    def _think_plain(self, about: str, text: str) -> str:
        if self.effort == "low":
            return f"This is {about}. Answer directly."
        if self.effort == "medium":
            return f"The user's message is {about}. No tool is needed for it. I answer directly and in a friendly way."
        return (
            f'The user says: "{text}" This is {about}. I look whether one of the tools could help, but no tool is needed. '
            "So I do not call anything. I answer directly, in plain words, short and in a friendly way."
        )

    def _missing_tool(self) -> Script:
        """Somebody asks for what no offered tool does."""
        rng = self.rng
        strangers = [f for f in families() if not any(confusable(f, item.family) for item in self.offers)]
        family = generic_family(self.words) if rng.random() < 0.2 else rng.choice(strangers)
        asked = request(self.words, offer(self.words, family))
        tools = ", ".join(item.tool.name for item in self.offers)
        answer = rng.choice(
            ["I am sorry, I have no tool for that.", "I cannot do that: none of my tools fits."]
        )
        if tools:
            answer += rng.choice(["", f" I can use {tools}."])
        if self.effort == "low":
            reasoning = f"The user wants {asked.goal}. No tool fits. Say so."
        elif self.effort == "medium":
            reasoning = f"The user wants {asked.goal}. I have no tool that does that. I must not guess, so I say that I cannot do it."
        else:
            reasoning = (
                f'The user says: "{asked.text}" They want {asked.goal}. The tools on offer are: {tools or "none"}. None of them '
                "does that, and I must not make up an answer. So I call nothing and say that I have no tool for it."
            )
        return [
            UserTurn(text=asked.text),
            Answer(reasoning, None, answer, "no fitting tool", (), asked.is_new_wording),
        ]
