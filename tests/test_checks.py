"""The exercises of every topic: right answers pass, wrong ones hear why not.

What is special about a topic's exercises is tested in test_<key>_checks.py.
"""

import doctest
import json

import pytest
from answers import ALL, answers, exercise, unanswered, verdict, worth, wrong

GRADED = [(key, name) for key, name in ALL if exercise(key, name).points]


def test_a_topic_has_exercises_of_both_kinds():
    for key in {key for key, _ in ALL}:
        points = [exercise(k, name).points for k, name in ALL if k == key]
        assert 2 <= points.count(0) <= 3
        assert 4 <= len(points) - points.count(0) <= 5


@pytest.mark.parametrize("seed", [0, "of a grading run"])
@pytest.mark.parametrize("key, name", ALL)
def test_the_solution_is_right(key, name, seed):
    said = verdict(key, name, answers(key)[name], seed)
    assert said == f"{name}: right {worth(key, name)}."


@pytest.mark.parametrize("key, name", ALL)
def test_an_unanswered_exercise_is_your_turn(key, name):
    assert verdict(key, name, unanswered) == f"{name}: your turn {worth(key, name)}."


@pytest.mark.parametrize("key, name", GRADED)
def test_the_examples_of_a_task_are_true(key, name):
    given = answers(key)
    finder = doctest.DocTestFinder()
    [task] = finder.find(given[name], name, globs=dict(given), module=False)
    assert task.examples
    assert doctest.DocTestRunner().run(task).failed == 0


@pytest.mark.parametrize("key, name", ALL)
def test_a_probe_gives_plain_values_that_the_oracle_knows(key, name):
    found = exercise(key, name).probe(answers(key)[name], 7)
    assert json.loads(json.dumps(found)) == found
    known = exercise(key, name).oracle(7)
    assert [set(facts) for facts in found] == [set(facts) for facts in known]


WRONG = [(key, *case) for key in {key: 0 for key, _ in ALL} for case in wrong(key)]


@pytest.mark.parametrize(
    "key, name, answer, words",
    WRONG,
    ids=[f"{key}-{name}-{answer.__name__}" for key, name, answer, _ in WRONG],
)
def test_a_wrong_answer_hears_why(key, name, answer, words):
    said = verdict(key, name, answer)
    assert said.startswith(f"{name}: not yet. ")
    assert words in said
    assert "\n" not in said


@pytest.mark.parametrize("key, name", ALL)
def test_there_are_wrong_answers_to_each_exercise(key, name):
    assert len([answer for answer in wrong(key) if answer[0] == name]) >= 4
