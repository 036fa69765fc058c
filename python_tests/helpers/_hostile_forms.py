"""Forms of answers that are hard to compile: schemas, patterns, choices, grammars, tags."""

import json
from typing import Any

Form = dict[str, Any]
MANY = 4_000  # properties, values or alternatives: more than any compiler reads quickly


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def strings(**limits: Any) -> Form:
    return {"type": "object", "properties": {"a": {"type": "string", **limits}}, "required": ["a"]}


def doubling(levels: int) -> Form:
    """Return a schema that is 2**levels values with its references written out."""
    definitions: Form = {f"d{levels}": {"type": "string"}}
    for level in range(levels):
        inner = {"$ref": f"#/$defs/d{level + 1}"}
        definitions[f"d{level}"] = {"properties": {"a": inner, "b": inner}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(levels: int, key: str = "items") -> Form:
    schema: Form = {"type": "string"}
    for _ in range(levels):
        schema = {key: schema}
    return schema


def tag(kind: str, **fields: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": {"type": kind, **fields}})


def _mutual(count: int) -> Form:
    of_each = {f"p{n}": {"$ref": f"#/$defs/d{n}"} for n in range(count)}
    definitions = {f"d{n}": {"properties": of_each} for n in range(count)}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


PATTERNS = {
    "look-ahead": "^(?=.*a)(?!b).+$",
    "look-behind": "(?<=a)(?<!b)c",
    "back reference": r"(a+)b\1",
    "unicode class": r"^\p{L}+\P{N}*$",
    "unicode range": "[\u0100-\U0010ffff]{1,200}",
    "stars of stars": "((((a*)*)*)*)*",
    "either of the same": "(a|a)*(a|a|aa)*$",
    "optional": "(a?){80}a{80}",
    "dots": ".*" * 100,
    "repeated": "(ab?c){0,3000}",
    "repeated twice": "(a{1,3000}){1,3000}",
    "repeated without end": "a{99999999999}",
    "open": "(" * 200,
    "nothing": "",
    "surrogate": "\ud800",
    "many options": "(a|b)?" * 800,
}

MANY_PROPERTIES: Form = {name: {} for name in names(MANY)}

SCHEMAS: Form = {
    "optional properties": {"type": "object", "properties": MANY_PROPERTIES},
    "closed properties": {
        "type": "object",
        "properties": MANY_PROPERTIES,
        "additionalProperties": False,
    },
    "enum": {"enum": names(100_000)},
    "anyOf": {"anyOf": [{"type": "string", "maxLength": k % 50} for k in range(MANY)]},
    "length": strings(maxLength=10**9),
    "items": {"type": "array", "items": strings(), "minItems": 10**9},
    "long value": {"enum": ["\u00e9" * 100_000]},
    "doubling": doubling(25),
    "deep": nested(400),
    "deep branches": nested(400, "not"),
    "mutual": _mutual(60),
    "product": {"allOf": [{"anyOf": [strings()] * 60}] * 60},
    "itself": {"$ref": "#"},
    "reference to nothing": {"$ref": "#/$defs/none"},
    "reference to a document": {"$ref": "https://example.com/schema.json"},
    "reference to a file": {"$ref": "file:///dev/zero"},
    "large number": {"type": "integer", "minimum": 10**40},
    "unknown type": {"type": "king"},
    "properties of a list": {"type": "object", "properties": [1, 2]},
    "nothing allowed": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "surrogate name": {"type": "object", "properties": {"\ud800": {}}},
    **{f"pattern: {name}": strings(pattern=pattern) for name, pattern in PATTERNS.items()},
}

GRAMMARS = {
    "left": 'root ::= root "a" | "a"',
    "ambiguous": 'root ::= root root | "a" | ""',
    "endless": "root ::= root",
    "empty loops": 'root ::= (("" | "a")* ("" | "a")*)*',
    "undefined": "root ::= nowhere",
    "nothing": "",
    "deep": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000,
    "lark": 'start: "a" | start "b"\n',
    "repeated": 'root ::= ("a"{1,9999} "b"){1,9999}',
    "repeated without end": 'root ::= "a"{1000000000}',
    "options": "root ::= " + ' ("a" | "b")?' * MANY,
    "number": 7,
}

CHOICES = {
    "many": names(100_000),
    "long": ["x" * 100_000],
    "nothing": [],
    "empty": [""],
    "lists": [["a"]],
    "NUL": ["\0"],
}

TAGS = {
    "no JSON": "{",
    "list": "[]",
    "unknown": tag("king"),
    "deep text": "[" * 100_000,
    "regex": tag("regex", pattern=PATTERNS["repeated twice"]),
    "grammar": tag("grammar", grammar=GRAMMARS["deep"]),
    "schema": tag("json_schema", json_schema=SCHEMAS["deep"]),
    "many": tag("or", elements=[{"type": "const_string", "value": a} for a in names(MANY)]),
}

FORMS: dict[str, Form] = {
    f"{kind}: {name}": {kind: value}
    for kind, forms in (
        ("json", SCHEMAS),
        ("regex", PATTERNS),
        ("choice", CHOICES),
        ("grammar", GRAMMARS),
        ("structural_tag", TAGS),
    )
    for name, value in forms.items()
}
