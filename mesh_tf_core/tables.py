"""Small tables of names, written as text: a list of words, or words with what they mean."""


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def pairs(text: str) -> dict[str, str]:
    """The mapping that "name:meaning name:meaning" states."""
    return dict(pair.split(":") for pair in text.split())
