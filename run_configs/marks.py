"""Pages partly written by scripts: between two marks stands what they write, and all else is written by hand."""


def between(text: str, begin: str, end: str, new: str) -> str:
    """The page `text` with `new` between the marks; it has both of them once."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n{new}\n\n{end}{rest.split(end)[1]}"
