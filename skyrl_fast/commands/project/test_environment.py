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
    assert (right.reward, right.done) == (0.5, True)  # in the third of four turns


def test_a_game_has_four_turns():
    steps = play(5, "1", "2", "3", "4")
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].reward == 0.0


def test_an_answer_without_a_guess_ends_the_game():
    for answer in ("none", "4 5 6"):
        (step,) = play(5, answer)
        assert (step.reward, step.done) == (0.0, True)
