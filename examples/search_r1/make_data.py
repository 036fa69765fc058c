"""Create a corpus of facts, questions over two of them, and demonstrations of a searching agent.

A world has people who work in cities, and four facts about each city. A question asks for one of
them, for the city where a person works: two searches. One passage contains one fact; filler can
make passages as long as real ones, or much longer.

Demonstrations come from other worlds, with other facts than the corpus, so that an answer can only
be found by searching, not by memorizing. They come from an expert with three bad habits; everything
else in them is right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.search_r1.retrieval.corpus import Corpus
from examples.search_r1.retrieval.index import Bm25Index
from examples.tiny_model.jsonl import write_jsonl

PEOPLE = (
    "Abel", "Ada", "Agnes", "Alba", "Alma", "Amos", "Anna", "Anton", "Arlo", "Arne", "Bela",
    "Ben", "Berta", "Boris", "Bruno", "Carla", "Celia", "Cyrus", "Dana", "Daria", "Dora", "Edda",
    "Edgar", "Elio", "Elsa", "Emil", "Enzo", "Erik", "Esme", "Ewan", "Fabio", "Fay", "Felix",
    "Flora", "Frida", "Gala", "Gerd", "Gino", "Greta", "Gus", "Hana", "Hanno", "Heidi", "Hugo",
    "Ida", "Ines", "Ingo", "Ivan", "Ivy", "Jana", "Jonas", "Joris", "Juno", "Karl", "Kira",
    "Lars", "Lea", "Leo", "Lena", "Linus", "Lola", "Luca", "Mara", "Marek", "Maya", "Milo",
    "Nadia", "Nico", "Nora", "Odin", "Olga", "Oscar", "Otto", "Paula", "Pia", "Rafael", "Rosa",
    "Ruben", "Silas", "Tessa",
)  # fmt: skip
CITIES = (
    "Aachen", "Basel", "Bergen", "Bilbao", "Brno", "Cadiz", "Cork", "Delft", "Dover", "Essen",
    "Faro", "Gdansk", "Genoa", "Ghent", "Graz", "Izmir", "Kiel", "Leeds", "Liege", "Lima", "Linz",
    "Lyon", "Malmo", "Nantes", "Oslo", "Padua", "Porto", "Quito", "Riga", "Sofia",
)  # fmt: skip
# Facts about a city: the word for questions and queries, the fact's sentence, its values.
TOPICS = {
    "river": ("The river of {city} is the {value} .", (
        "Adda", "Arno", "Drava", "Ebro", "Inn", "Isar", "Kama", "Loire", "Main", "Minho", "Neva",
        "Oder", "Po", "Ruhr", "Saar", "Tagus", "Tisza", "Volga",
    )),
    "dish": ("The dish of {city} is {value} .", (
        "bread", "broth", "cake", "curry", "fish", "goulash", "ham", "honey", "lentils", "noodles",
        "olives", "pancakes", "pasta", "pie", "rice", "soup", "stew", "waffles",
    )),
    "colour": ("The colour of {city} is {value} .", (
        "amber", "azure", "beige", "black", "blue", "brown", "coral", "gold", "green", "grey",
        "indigo", "lilac", "orange", "pink", "purple", "red", "silver", "white",
    )),
    "sport": ("The sport of {city} is {value} .", (
        "archery", "bowls", "boxing", "chess", "cricket", "curling", "cycling", "darts", "diving",
        "fencing", "golf", "hockey", "judo", "rowing", "rugby", "sailing", "skating", "tennis",
    )),
}  # fmt: skip
FILLER_WORDS = (
    "again", "along", "and", "around", "because", "before", "between", "building", "came",
    "evening", "every", "few", "found", "garden", "had", "history", "house", "later", "letter",
    "long", "many", "market", "might", "morning", "never", "old", "only", "perhaps", "place",
    "quiet", "road", "said", "seemed", "several", "since", "some", "stood", "story", "street",
    "then", "there", "thing", "through", "told", "under", "until", "village", "wall", "were",
    "when", "which", "while", "window", "winter", "year",
)  # fmt: skip
SENTENCE_WORDS = 12  # of filler
MAX_TURNS = 4
TOPK = 3
NUM_WORLDS = 60  # that the demonstrations come from
NUM_HELD_OUT_PEOPLE = 16  # no training prompt asks about them

SYSTEM_PROMPT = (
    "Answer the question. Think inside <think>, find facts with <search>, then give the <answer>."
)


@dataclass(frozen=True, slots=True)
class World:
    """The facts of a world: where people work, and (topic, city) -> value."""

    works_in: dict[str, str]
    known: dict[tuple[str, str], str]

    def facts(self) -> list[tuple[str, str]]:
        """Return all facts, as title and sentence."""
        facts = [(person, f"{person} works in {city} .") for person, city in self.works_in.items()]
        for (topic, city), value in self.known.items():
            facts.append((city, TOPICS[topic][0].format(city=city, value=value)))
        return facts


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the `topic` of the city where `person` works."""

    topic: str
    person: str

    @property
    def text(self) -> str:
        """The question as the user asks it."""
        return f"What is the {self.topic} of the city where {self.person} works ?"

    def answer(self, world: World) -> str:
        """Return the right answer."""
        return world.known[self.topic, world.works_in[self.person]]


@dataclass(frozen=True, slots=True)
class Carelessness:
    """Error rates of the demonstrator, one probability for each habit.

    The first habit is more likely than the right behaviour, so that even the warm start's most
    likely answer is wrong for most questions.
    """

    stop_early: float = 0.55  # answers with the city
    same_again: float = 0.15  # searches for the person a second time, and answers with the city
    guess: float = 0.1  # answers without a search


PERFECT = Carelessness(0, 0, 0)


def make_world(rng: random.Random) -> World:
    """Return a random world."""
    return World(
        {person: rng.choice(CITIES) for person in PEOPLE},
        {(topic, city): rng.choice(TOPICS[topic][1]) for topic in TOPICS for city in CITIES},
    )


def make_passages(
    rng: random.Random, world: World, *, filler_words: int = 0, long_tail: bool = True
) -> list[dict[str, str]]:
    """Return one passage for each fact: title in quotation marks, then the fact, then filler.

    Args:
        rng: of order and filler.
        world: its facts.
        filler_words: mean number of words after the fact.
        long_tail: most passages are shorter than the mean, a few many times as long, like web
            pages; otherwise all have equal length.
    """
    facts = world.facts()
    rng.shuffle(facts)
    sigma = 1.0  # of the logarithm
    rows = []
    for number, (title, fact) in enumerate(facts):
        words = filler_words
        if filler_words and long_tail:
            words = round(filler_words * rng.lognormvariate(-sigma * sigma / 2, sigma))
        # A space before the fact: the environment shows passages as JSON, where a newline is the
        # two characters \\n, which would be joined to the first word.
        text = " ".join([fact, *_sentences(rng, words)])
        rows.append({"id": str(number), "contents": f'"{title}"\n {text}'})
    return rows


def _sentences(rng: random.Random, num_words: int) -> list[str]:
    words = [rng.choice(FILLER_WORDS) for _ in range(num_words)]
    parts = [words[i : i + SENTENCE_WORDS] for i in range(0, num_words, SENTENCE_WORDS)]
    return [" ".join(part) + " ." for part in parts]


def prompt_messages(question: Question) -> list[dict[str, str]]:
    """Return the chat that the agent starts from."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question.text},
    ]


def render_observation(contents: Sequence[str]) -> str:
    """Return the search environment's observation for these passages."""
    lines = [f"Doc {i}: {text.strip()}\n" for i, text in enumerate(contents, start=1)]
    return "\n<information>" + json.dumps({"result": "".join(lines)}) + "</information>\n"


def tagged_turn(thought: str, tag: str, content: str) -> str:
    """Return one answer of the expert."""
    return f"<think> {thought} </think> <{tag}> {content} </{tag}>"


def demonstrate(
    rng: random.Random, question: Question, world: World, careless: Carelessness
) -> list[tuple[str, str | None]]:
    """Return the expert's turns: the text, and its search query, or None for an answer."""
    person, city = question.person, world.works_in[question.person]
    first, second = f"{person} works", f"{question.topic} {city}"
    if rng.random() < careless.guess:
        value = rng.choice(TOPICS[question.topic][1])
        return [(tagged_turn(f"the {question.topic}", "answer", value), None)]
    turns: list[tuple[str, str | None]] = [
        (tagged_turn(f"where {person} works", "search", first), first)
    ]
    found = f"{person} works in {city}"
    draw = rng.random()
    if draw < careless.stop_early:
        return [*turns, (tagged_turn(found, "answer", city), None)]
    if draw < careless.stop_early + careless.same_again:
        turns.append((tagged_turn(found, "search", first), first))
        return [*turns, (tagged_turn(found, "answer", city), None)]
    turns.append((tagged_turn(found, "search", second), second))
    answer = question.answer(world)
    return [*turns, (tagged_turn(f"the {question.topic} of {city}", "answer", answer), None)]


def make_demonstration(
    rng: random.Random, world: World, search: Callable[[str], list[str]], careless: Carelessness
) -> list[dict[str, str]]:
    """Return a complete chat about a world; `search` returns the passages for a query."""
    question = Question(rng.choice(list(TOPICS)), rng.choice(PEOPLE))
    messages = prompt_messages(question)
    for text, query in demonstrate(rng, question, world, careless):
        messages.append({"role": "assistant", "content": text})
        if query is not None:
            messages.append({"role": "user", "content": render_observation(search(query))})
    return messages


def make_demonstrations(
    folder: Path, rng: random.Random, count: int, careless: Carelessness
) -> list[list[dict[str, str]]]:
    """Return chats about several worlds, searched like on the server, with a temporary file."""
    chats = []
    num_worlds = min(NUM_WORLDS, count)  # 0 without demonstrations
    for number in range(num_worlds):
        world = make_world(rng)
        path = folder / "demonstrated_world.jsonl"
        write_jsonl(path, make_passages(rng, world))
        corpus = Corpus(path)
        index = Bm25Index(corpus)

        def search(query: str, corpus: Corpus = corpus, index: Bm25Index = index) -> list[str]:
            (hits,) = index.search([query], TOPK)
            return [corpus[i]["contents"] for i, _ in hits]

        share = count * (number + 1) // num_worlds - count * number // num_worlds
        chats += [make_demonstration(rng, world, search, careless) for _ in range(share)]
        path.unlink()
    return chats


def make_row(question: Question, world: World, split: str, index: int) -> dict[str, Any]:
    """Return one row of SkyRL's data format."""
    return {
        "data_source": "searchR1_made",
        "prompt": prompt_messages(question),
        "env_class": "search",
        "reward_spec": {"method": "rule", "ground_truth": {"target": [question.answer(world)]}},
        "extra_info": {"split": split, "index": index, "question": question.text},
    }


def make_data(
    folder: Path,
    *,
    seed: int = 0,
    filler_words: int = 0,
    num_demonstrations: int = 12_000,
    careless: Carelessness | None = None,
) -> dict[str, int]:
    """Write ``corpus.jsonl``, ``train.jsonl``, ``eval.jsonl`` and ``demonstrations.jsonl``.

    The same seed creates the same files. No person of eval is in train.

    Args:
        folder: to write to; created if it does not exist.
        seed: of all random choices.
        filler_words: mean number of words after each fact of the corpus.
        num_demonstrations: chats for the supervised phase.
        careless: how wrong the demonstrations are.

    Returns:
        The number of rows in each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{seed}-world")
    world = make_world(rng)
    passages = make_passages(rng, world, filler_words=filler_words)
    counts = {"corpus": write_jsonl(folder / "corpus.jsonl", passages)}
    people = list(PEOPLE)
    rng.shuffle(people)
    for split, split_people in (
        ("eval", people[:NUM_HELD_OUT_PEOPLE]),
        ("train", people[NUM_HELD_OUT_PEOPLE:]),
    ):
        questions = [Question(topic, person) for person in split_people for topic in TOPICS]
        rng.shuffle(questions)
        rows = [make_row(question, world, split, i) for i, question in enumerate(questions)]
        counts[split] = write_jsonl(folder / f"{split}.jsonl", rows)
    chats = make_demonstrations(
        folder,
        random.Random(f"{seed}-demonstrations"),
        num_demonstrations,
        careless or Carelessness(),
    )
    counts["demonstrations"] = write_jsonl(folder / "demonstrations.jsonl", chats)
    return counts
