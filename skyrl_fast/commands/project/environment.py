"""A guessing game: the environment of this project. Replace it by your own."""

import re

from skyrl_fast.train import Env, EnvStep

LARGEST = 9
MAX_TURNS = 3


class Guess(Env):
    """Answers each guess with "higher" or "lower"; rewards the last one by its distance."""

    def __init__(self, row):
        self.secret = row["secret"]
        self.turns = 0

    def step(self, action):
        """Return the reward of a guess, and what the model reads next."""
        self.turns += 1
        number = re.search(r"\d+", action)
        guess = int(number[0]) if number else None
        if guess is None or not 1 <= guess <= LARGEST:
            return EnvStep(0.0, done=True)  # no guess: nothing to learn from a longer trajectory
        if guess == self.secret or self.turns == MAX_TURNS:
            return EnvStep(1 - abs(guess - self.secret) / LARGEST, done=True)
        hint = "higher" if guess < self.secret else "lower"
        return EnvStep(0.0, done=False, observations=hint)
