"""Exact match: the visible final answer equals the gold answer, up to white space."""

from xrpo_fast.rewards.extract import last_box, visible_text


def extract_exact(text: str) -> str | None:
    r"""The last `\boxed{}` after the thought, else all text after it; white space collapsed."""
    visible = visible_text(text)
    if visible is None:
        return None
    box = last_box(visible)
    return " ".join((visible if box is None else box).split())


def verify_exact(text: str, answer: object) -> bool:
    """True where the extracted answer equals str(answer), up to white space."""
    extracted = extract_exact(text)
    return extracted is not None and extracted == " ".join(str(answer).split())
