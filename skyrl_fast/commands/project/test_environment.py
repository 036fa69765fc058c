"""Run with `pytest`."""

from environment import Guess


def play(secret, *guesses):
    """Return the steps of a game with these guesses."""
    game = Guess({"secret": secret})
    return [game.step(guess) for guess in guesses]


def test_a_hint_follows_a_wrong_guess():
    low, high, right = play(5, "3", "8 ?", "5")
    assert (low.observations, low.done) == ("higher", False)
    assert (high.observations, high.done) == ("lower", False)
    assert (right.reward, right.done) == (1.0, True)


def test_the_last_guess_is_rewarded_by_its_distance():
    assert play(5, "1", "1", "2")[-1].reward == 1 - 3 / 9


def test_an_answer_without_a_guess_ends_the_game():
    for answer in ("none", "77"):
        (step,) = play(5, answer)
        assert (step.reward, step.done) == (0.0, True)
