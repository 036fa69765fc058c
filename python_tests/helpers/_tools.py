"""A chat template with tools, and a parser of the calls that it writes."""

import json
import re
from typing import Any

from fake_envs import says

from skyrl_fast.rollout.tool_calls import ParsedAnswer

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<call>{"name": "look", "arguments": {"at": "door"}}</call>'


def answer_of(tokenizer: Any) -> Any:
    return lambda call, n: says(tokenizer, f"I look.{CALL}" if n == 0 else "done")


HOSTILE = "a" * 2_000 + "!"


class SlowParser:
    """Stands in for vLLM's parsers: takes years for HOSTILE, and holds the interpreter's lock."""

    def parse(self, text: str, tools: Any, *, forced: str | None = None) -> ParsedAnswer:
        re.fullmatch("(a+)+", text)
        return ParsedAnswer("quick")


class CallParser:
    """Stands in for vLLM's parsers: JSON between tags is a call."""

    def parse(self, text: str, tools: Any, *, forced: str | None = None) -> ParsedAnswer:
        before, found, rest = text.partition("<call>")
        if not found:
            return ParsedAnswer(text)
        try:
            calls = [json.loads(part.partition("</call>")[0]) for part in rest.split("<call>")]
        except ValueError:
            return ParsedAnswer(text, failed=True)
        return ParsedAnswer(before, [{"type": "function", "function": call} for call in calls])

    def forcing(self, tools: Any, forced: str) -> dict[str, Any]:
        names = [tool["function"]["name"] for tool in tools]
        if forced not in ("required", *names):
            raise ValueError(f"no function {forced}")
        return {"grammar": f'root ::= "call {forced}"'}
