"""A guessing game: the environment of this project. Replace it by your own."""

import re

from skyrl_fast import Env, EnvStep

MAX_TURNS = 4


class Guess(Env):
    """Answers a guess with "higher" or "lower"; the reward falls with each turn."""

    def __init__(self, row):
        self.secret = row["secret"]
        self.turns = 0

    def step(self, action):
        """Return the reward of a guess, and what the model reads next."""
        self.turns += 1
        numbers = re.findall(r"\d+", action)
        guess = int(numbers[0]) if len(numbers) == 1 else None  # "7 8 9" is no guess
        if guess == self.secret:
            return EnvStep(1 - (self.turns - 1) / MAX_TURNS, done=True)
        if guess is None or self.turns == MAX_TURNS:
            return EnvStep(0.0, done=True)
        if guess < self.secret:
            hint = "higher"
        else:
            hint = "lower"
        return EnvStep(0.0, done=False, observations=hint)
