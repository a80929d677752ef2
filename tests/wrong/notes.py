"""For each topic's wrong answers: what they are an answer to, and what they hear."""


def notes():
    """Return a list of (exercise, answer, words that the verdict must contain), and the
    decorator that adds an answer to it."""
    noted = []

    def told(exercise, words):
        def note(answer):
            noted.append((exercise, answer, words))
            return answer

        return note

    return noted, told
