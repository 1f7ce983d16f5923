"""The demo model's reasoning before a call or an answer: one to five sentences, by effort."""

import json
import random
from typing import NamedTuple

from frontend.harmony.conversation import ReasoningEffort
from tools.demo_requests import Request

Facts = tuple[tuple[str, str], ...]
_NUM_FACTS = {"low": 2, "medium": 4, "high": 8}


class Thinker(NamedTuple):
    """Writes reasoning of one effort; `offered` are the names of the offered tools."""

    rng: random.Random
    effort: ReasoningEffort
    offered: tuple[str, ...]

    def about_call(self, asked: Request, text: str, *, is_next: bool) -> str:
        """Before a call; `is_next` if it is not the first for the same message `text`."""
        name, goal = asked.offer.tool.name, asked.goal
        if self.effort == "low":
            start = "Next we need" if is_next else self.rng.choice(["We need", "The user wants", "Need"])
            return f"{start} {goal}. {self.rng.choice(['Use', 'Call'])} {name}."
        start = "Next the user" if is_next else "The user"
        wish = f"{start} wants {goal}. {self.rng.choice(['The tool', 'The function'])} {name} does that."
        if self.effort == "medium":
            return f"{wish} {_listed(asked.arguments)}"
        return (
            f'The user says: "{text}" The tools on offer are: {", ".join(self.offered)}. '
            f"{wish} {_listed(asked.arguments)} "
            f"I call {name} now, wait for its result, and then I answer with what it returns."
        )

    def about_result(self, requests: list[Request], facts: Facts, text: str) -> str:
        """Before an answer that uses results."""
        listed = ", ".join(f"{name} {value}" for name, value in facts[: _NUM_FACTS[self.effort]])
        if self.effort == "low":
            start = self.rng.choice(["The tool returned", "We have the result:", "The result is"])
            return f"{start} {listed}. Answer briefly."
        goals = " and ".join(asked.goal for asked in requests)
        if self.effort == "medium":
            return f"The user wanted {goals}. The result is {listed}. Now I can answer."
        names = " and ".join(dict.fromkeys(asked.offer.tool.name for asked in requests))
        return (
            f'The user said: "{text}" They wanted {goals}. I called {names}, and the result is {listed}. '
            "That is all I need, no other call is needed. I answer in plain words and use these values."
        )

    def about_small_talk(self, topic: str, text: str) -> str:
        """Before an answer without a tool."""
        if self.effort == "low":
            return f"This is {topic}. Answer directly."
        if self.effort == "medium":
            return (
                f"The user's message is {topic}. No tool is needed for it. "
                "I answer directly and in a friendly way."
            )
        return (
            f'The user says: "{text}" This is {topic}. '
            "I look whether one of the tools could help, but no tool is needed. "
            "So I do not call anything. I answer directly, in plain words, short and in a friendly way."
        )

    def about_missing_tool(self, asked: Request) -> str:
        """Before saying that no offered tool can do it."""
        if self.effort == "low":
            return f"The user wants {asked.goal}. No tool fits. Say so."
        if self.effort == "medium":
            return (
                f"The user wants {asked.goal}. I have no tool that does that. "
                "I must not guess, so I say that I cannot do it."
            )
        return (
            f'The user says: "{asked.text}" They want {asked.goal}. '
            f"The tools on offer are: {', '.join(self.offered) or 'none'}. None of them "
            "does that, and I must not make up an answer. "
            "So I call nothing and say that I have no tool for it."
        )


def _listed(arguments: dict[str, object]) -> str:
    if not arguments:
        return "It takes no arguments."
    pairs = [f"{k} is {v if isinstance(v, str) else json.dumps(v)}" for k, v in arguments.items()]
    return f"Arguments: {', '.join(pairs)}."
