"""Write the table of request parameters in docs/guide/gateway.md.

python -m scripts.gateway_parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skyrl_fast.gateway.dialects import parameters
from skyrl_fast.gateway.dialects.anthropic_messages import MessagesRequest
from skyrl_fast.gateway.dialects.openai_chat import ChatRequest
from skyrl_fast.gateway.dialects.openai_completions import CompletionRequest
from skyrl_fast.gateway.dialects.openai_responses import ResponseRequest
from skyrl_fast.gateway.dialects.parameters import Parameter
from skyrl_fast.gateway.request_body import Fields

PAGE = Path(__file__).resolve().parent.parent / "docs/guide/gateway.md"
BEGIN, END = "<!-- python -m scripts.gateway_parameters -->\n", "<!-- end -->\n"
DIALECTS: dict[str, tuple[type[Fields], Mapping[str, Parameter]]] = {
    "chat completions": (ChatRequest, parameters.CHAT),
    "completions": (CompletionRequest, parameters.COMPLETIONS),
    "responses": (ResponseRequest, parameters.RESPONSES),
    "Anthropic messages": (MessagesRequest, parameters.MESSAGES),
}


def table() -> str:
    """Return the table, in Markdown."""
    lines = [
        "| API | honoured | refused | ignored, and named once in the log |",
        "|---|---|---|---|",
    ]
    for name, (model, others) in DIALECTS.items():
        honoured = sorted(field.alias or name for name, field in model.model_fields.items())
        kinds = [
            sorted(name for name, parameter in others.items() if parameter.kind == kind)
            for kind in (parameters.REFUSED, parameters.IGNORED)
        ]
        cells = (", ".join(f"`{name}`" for name in names) for names in (honoured, *kinds))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page's text with the table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
