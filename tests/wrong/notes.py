"""For each topic's answers: what they are an answer to, and what wrong ones hear."""


def notes():
    """Return a list of (exercise, answer, *words), and the decorator that adds one to
    it; words: what the verdict on a wrong answer must contain."""
    noted = []

    def told(exercise, *words):
        def note(answer):
            noted.append((exercise, answer, *words))
            return answer

        return note

    return noted, told
