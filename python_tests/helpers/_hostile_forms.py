"""Forms of answers that are hard to compile: schemas, patterns, choices, grammars, tags."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

Form = dict[str, Any]
SIZES = (40, 400, 4_000, 100_000)  # around the limits


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def strings(**limits: Any) -> Form:
    return {"type": "object", "properties": {"a": {"type": "string", **limits}}, "required": ["a"]}


def doubling(levels: int, key: str = "properties") -> Form:
    """Return a schema that is 2**levels values with its references written out."""
    definitions: Form = {f"d{levels}": {"type": "string"}}
    for level in range(levels):
        inner = {"$ref": f"#/$defs/d{level + 1}"}
        both = {"a": inner, "b": inner} if key == "properties" else [inner, inner]
        definitions[f"d{level}"] = {key: both}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(levels: int, key: str = "items") -> Form:
    schema: Form = {"type": "string"}
    for _ in range(levels):
        schema = {key: {"a": schema} if key == "properties" else schema}
        if key in ("anyOf", "allOf", "oneOf"):
            schema = {key: [schema[key], {"type": "integer"}]}
    return schema


def _patterns() -> Iterator[tuple[str, str]]:
    yield from {
        "look-ahead": "^(?=.*a)(?!b).+$",
        "look-behind": "(?<=a)(?<!b)c",
        "back reference": r"(a+)b\1",
        "named reference": r"(?P<x>a+)(?P=x)",
        "condition": r"(a)?(?(1)b|c)",
        "unicode class": r"^\p{L}+\P{N}*$",
        "unicode range": "[\u0100-\U0010ffff]{1,200}",
        "not a letter": "[^a]{1,240}",
        "any": ".{0,240}",
        "words": r"(\w+\s){1,200}\S",
        "stars": "(a*)*b",
        "stars of stars": "((((a*)*)*)*)*",
        "pluses": "((a+)+)+$",
        "either of the same": "(a|a)*(a|a|aa)*$",
        "optional": "(a?){80}a{80}",
        "lazy": ".*?" * 40,
        "dots": ".*" * 100,
        "flags": "(?i)abc",
        "flags inside": "(?i:abc)",
        "comment": "(?#a)b",
        "atomic": "(?>a*)b",
        "possessive": "a*+b",
        "word end": r"\bword\b",
        "octal": r"\0\x00\u0000",
        "NUL": "a\0b",
        "surrogate": "\ud800",
        "open": "(" * 200,
        "closed": ")" * 200,
        "nested groups": "(" * 100 + "a" + ")" * 100,
        "nothing": "",
        "empty choice": "(|a|)*",
        "reversed": "a{5,2}",
        "many classes": "[a-z0-9]" * 60,
        "classes of all": "[\\s\\S]{0,240}",
        "time": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}:\d{2})$",
    }.items()
    for n in (30, 300, 3_000, 10**6, 10**12):
        yield f"a{{{n}}}", f"a{{{n}}}"
        yield f"a{{0,{n}}}", f"(ab?c){{0,{n}}}"
        yield f"({n})", f"(a{{1,{n}}}){{1,{n}}}"
    for n in (100, 490, 5_000):
        yield f"literal {n}", "ab" * (n // 2)
        yield f"choices {n}", "|".join(names(n // 5))
        yield f"options {n}", "(a|b)?" * (n // 6)


def _schemas() -> Iterator[tuple[str, Any]]:
    for name, pattern in _patterns():
        yield f"pattern {name}", strings(pattern=pattern)
    for n in SIZES:
        yield f"maxLength {n}", strings(maxLength=n)
        yield f"minLength {n}", strings(minLength=n)
        yield f"minItems {n}", {"type": "array", "items": {"type": "integer"}, "minItems": n}
        yield f"maxItems of objects {n}", {"type": "array", "items": strings(), "maxItems": n}
        yield f"prefixItems {n}", {"type": "array", "prefixItems": [{"type": "integer"}] * n}
        yield f"maxProperties {n}", {"type": "object", "maxProperties": n, "minProperties": n}
        optional = {"type": "object", "properties": {a: {"type": "string"} for a in names(n)}}
        yield f"optional properties {n}", optional
        yield f"required properties {n}", {**optional, "required": names(n)}
        yield f"closed properties {n}", {**optional, "additionalProperties": False}
        yield f"limited properties {n}", {**optional, "maxProperties": n // 2}
        yield f"required unknown {n}", {"type": "object", "required": names(n)}
        yield (
            f"patternProperties {n}",
            {"type": "object", "patternProperties": {a: {} for a in names(n)}},
        )
        yield (
            f"dependentSchemas {n}",
            {"type": "object", "dependentSchemas": {a: {} for a in names(n)}},
        )
        yield f"definitions {n}", {"$defs": {a: {} for a in names(n)}, "type": "object"}
        yield f"enum {n}", {"enum": names(n)}
        yield f"enum of prefixes {n}", {"enum": ["a" * k for k in range(1, min(n, 400))]}
        yield f"enum of numbers {n}", {"enum": list(range(n))}
        yield f"enum of objects {n}", {"enum": [{"a": [k]} for k in range(n)]}
        yield f"long value {n}", {"enum": ["\u00e9" * n]}
        yield f"const {n}", {"const": {"a": "x" * n}}
        for key in ("anyOf", "oneOf", "allOf"):
            yield f"{key} {n}", {key: [{"type": "string", "maxLength": k % 50} for k in range(n)]}
            yield f"{key} of objects {n}", {key: [strings(maxLength=k % 50) for k in range(n // 8)]}
        yield (
            f"long name {n}",
            {"type": "object", "properties": {"x" * n: {}}, "required": ["x" * n]},
        )
        yield f"title {n}", {"type": "string", "title": "x" * n, "description": "y" * n}
    for levels in (8, 11, 25, 200):
        for key in ("properties", "anyOf", "allOf", "oneOf", "prefixItems"):
            yield f"doubling {key} {levels}", doubling(levels, key)
    for levels in (20, 47, 400):
        for key in ("items", "properties", "anyOf", "allOf", "not", "additionalProperties"):
            yield f"nested {key} {levels}", nested(levels, key)
    for n in (5, 20, 60):
        either = {"anyOf": [{"type": "string", "enum": names(n)}, {"type": "integer"}]}
        yield f"product {n}", {"type": "object", "properties": dict.fromkeys(names(n), either)}
        yield f"product of all {n}", {"allOf": [{"anyOf": [strings()] * n}] * n}
        yield f"mutual {n}", {
            "$defs": {
                f"d{k}": {"properties": {f"p{j}": {"$ref": f"#/$defs/d{j}"} for j in range(n)}}
                for k in range(n)
            },
            "$ref": "#/$defs/d0",
        }  # fmt: skip
    for number in (1, -1, 1e308, -1e308, 10**40, 5e-324, 0.1):
        yield f"minimum {number}", {"type": "integer", "minimum": number}
        yield f"range {number}", {"type": "number", "exclusiveMinimum": -7, "maximum": number}
        yield f"multipleOf {number}", {"type": "number", "multipleOf": number}
    for kind in ("email", "date-time", "uri", "ipv6", "uuid", "hostname", "regex", "duration", "x"):
        yield f"format {kind}", strings(format=kind)
    loop: Form = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    yield from {
        "itself": {"$ref": "#"},
        "loop": loop,
        "list of itself": {"type": "array", "items": {"$ref": "#"}},
        "tree": {"type": "object", "properties": {a: {"$ref": "#"} for a in names(30)}},
        "reference to itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "reference to nothing": {"$ref": "#/$defs/none"},
        "reference into a list": {"anyOf": [{"type": "string"}], "$ref": "#/anyOf/0"},
        "reference to a document": {"$ref": "https://example.com/schema.json"},
        "reference to a file": {"$ref": "file:///dev/zero"},
        "anchor": {"$id": "http://a/b", "$anchor": "x", "$dynamicRef": "#x"},
        "type of all": {"type": ["string", "integer", "object", "array", "null", "boolean"]},
        "unknown type": {"type": "king"},
        "type of a number": {"type": 7},
        "no types": {"type": []},
        "nothing allowed": {"allOf": [{"type": "string"}, {"type": "integer"}]},
        "false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "not": {"not": {}},
        "if": {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": "integer"}},
        "unique": {"type": "array", "uniqueItems": True, "items": {"enum": names(300)}},
        "contains": {"type": "array", "contains": {"type": "string"}, "minContains": 50},
        "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a+$"}},
        "unevaluated": {"type": "object", "unevaluatedProperties": False},
        "properties of a list": {"type": "object", "properties": [1, 2]},
        "pattern of a number": {"type": "string", "pattern": 7},
        "enum of nothing": {"enum": []},
        "enum of text": {"enum": "abc"},
        "negative length": strings(minLength=-1),
        "more than most": strings(minLength=9, maxLength=3),
        "length of text": strings(maxLength="9"),
        "NUL name": {"type": "object", "properties": {"\0": {}}, "required": ["\0"]},
        "surrogate name": {"type": "object", "properties": {"\ud800": {}}},
        "surrogate value": {"enum": ["\ud800"]},
        "empty": {},
        "any object": {"type": "object"},
        "any list": {"type": "array"},
    }.items()  # fmt: skip


def _choices() -> Iterator[tuple[str, Any]]:
    for n in SIZES:
        yield f"{n}", names(n)
        yield f"of prefixes {n}", ["a" * k for k in range(1, min(n, 440))]
        yield f"long {n}", ["x" * n, "y" * n]
        yield f"the same {n}", ["a"] * n
        yield f"quoted {n}", ['"\\' * n]
    yield "nothing", []
    yield "empty", [""]
    yield "numbers", [1, 2]
    yield "lists", [["a"]]
    yield "text", "abc"
    yield "surrogate", ["\ud800"]
    yield "NUL", ["\0"]


def _grammars() -> Iterator[tuple[str, Any]]:
    yield from {
        "left": 'root ::= root "a" | "a"',
        "left twice": 'root ::= x "a"\nx ::= root "b" | "c"',
        "ambiguous": 'root ::= root root | "a" | ""',
        "ambiguous lists": 'root ::= ("a" | "a" "a" | x)*\nx ::= ("a"* "a"*)*',
        "endless": "root ::= root",
        "empty loop": 'root ::= ("")*',
        "empty loops": 'root ::= (("" | "a")* ("" | "a")*)*',
        "undefined": "root ::= nowhere",
        "no root": 'other ::= "a"',
        "nothing": "",
        "words": "what is this",
        "open": "root ::= " + "(" * 5_000,
        "nested": "root ::= " + "(" * 2_000 + '"a"' + ")" * 2_000,
        "deep": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "lark": 'start: "a" | start "b"\n',
        "lark terminals": 'start: WORD+\nWORD: /[a-z]+/\n%ignore " "',
        "look-ahead": 'root ::= "a" (= "b") "c"',
        "NUL": 'root ::= "\0"',
        "surrogate": 'root ::= "\ud800"',
        "number": 7,
        "list": ["root"],
    }.items()  # fmt: skip
    for n in (20, 300, 3_000, 10**5, 10**9):
        yield f"repeated {n}", f'root ::= "a"{{{n}}}'
        yield f"repeated class {n}", f"root ::= [a-z]{{0,{n}}}"
        yield f"repeated rule {n}", f'root ::= x{{0,{n}}}\nx ::= "a" | "b" x?'
        yield f"repeated twice {n}", f'root ::= ("a"{{1,{n}}} "b"){{1,{n}}}'
    for n in (100, 1_000, 4_000):
        rules = "\n".join(f'r{k} ::= "a" r{k + 1} | "b" r{k + 1}' for k in range(n))
        yield f"chain {n}", f'root ::= r0\n{rules}\nr{n} ::= ""'
        yield f"choices {n}", "root ::= " + " | ".join(f'"{name}"' for name in names(n))
        yield f"options {n}", "root ::= " + ' ("a" | "b")?' * n
        yield (
            f"same starts {n}",
            "root ::= "
            + " | ".join(f'"{"a" * (k % 20)}" x' for k in range(n))
            + '\nx ::= "a" x | "b"',
        )
        yield f"literal {n}", f'root ::= "{"ab" * n * 10}"'
    for n in (6, 12, 25):
        rules = "\n".join(f"r{k} ::= r{k + 1} r{k + 1}" for k in range(n))
        yield f"doubling {n}", f'root ::= r0\n{rules}\nr{n} ::= "a" | "b"'


def _tags() -> Iterator[tuple[str, Any]]:
    def tag(form: Any) -> str:
        return json.dumps({"type": "structural_tag", "format": form})

    def of(kind: str, key: str, value: Any) -> str:
        return tag({"type": kind, key: value})

    yield "no JSON", "{"
    yield "list", "[]"
    yield "no format", "{}"
    yield "unknown", tag({"type": "king"})
    yield "deep text", "[" * 100_000
    for n in SIZES:
        ends = [{"begin": f"<{a}>", "schema": {"type": "string"}, "end": "</>"} for a in names(n)]
        yield f"structures {n}", json.dumps({"structures": ends, "triggers": ["<"]})
        texts = [{"type": "const_string", "value": a} for a in names(n)]
        for kind in ("or", "sequence"):
            yield f"{kind} {n}", of(kind, "elements", texts)
        tags = [
            {"begin": f"<{a}>", "content": {"type": "any_text"}, "end": "</>"} for a in names(n)
        ]
        yield f"tags {n}", tag({"type": "triggered_tags", "triggers": ["<"], "tags": tags})
        separated = {"type": "tags_with_separator", "tags": tags, "separator": ","}
        yield f"separated {n}", tag(separated)
        yield f"literal {n}", of("const_string", "value", "ab" * n)
        excludes = {"type": "any_text", "excludes": names(n)}
        yield f"excludes {n}", tag(excludes)
    for name, pattern in list(_patterns())[:40:3]:
        yield f"regex {name}", of("regex", "pattern", pattern)
    for name, grammar in list(_grammars())[::4]:
        yield f"grammar {name}", of("grammar", "grammar", grammar)
    for name, schema in list(_schemas())[60::12]:
        yield f"schema {name}", of("json_schema", "json_schema", schema)


@functools.cache
def all_forms() -> dict[str, Form]:
    """Return all forms, of each family, by name."""
    families: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
        "json": _schemas,
        "regex": _patterns,
        "choice": _choices,
        "grammar": _grammars,
        "structural_tag": _tags,
    }
    return {
        f"{kind}: {name}": {kind: value}
        for kind, family in families.items()
        for name, value in family()
    }
