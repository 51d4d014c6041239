"""The largest batch that fits a memory."""

from __future__ import annotations

from collections.abc import Callable

MOST = 1 << 16  # images of a rank in one forward
PATIENCE = 10  # questions, after which what is left is halved and halved again


def largest_batch(peak_of: Callable[[int], int], memory: int, start: int) -> int:
    """The largest number of images whose peak fits ``memory`` bytes; 0 if one image does not, at most MOST.

    ``peak_of(images)``, bytes, grows with the images and nearly in proportion, so a straight line through two
    known points, at first ``start`` and one more, leads to the answer in a few questions.
    """
    fits, too_many = 0, MOST + 1
    known = {images: peak_of(images) for images in (start, start + 1)}
    for images, peak in known.items():
        fits, too_many = (images, too_many) if peak <= memory else (fits, min(too_many, images))
    while too_many - fits > 1:
        guess = _on_a_line(known, memory) if len(known) < PATIENCE else (fits + too_many) // 2
        images = min(max(guess, fits + 1), too_many - 1)
        known[images] = peak_of(images)
        if known[images] <= memory:
            fits = images
        else:
            too_many = images
    return fits


def _on_a_line(known: dict[int, int], memory: int) -> int:
    """Where the line through the two known points nearest to ``memory`` reaches it."""
    (a, low), (b, high) = sorted(known.items(), key=lambda item: abs(item[1] - memory))[:2]
    if low == high:
        return 2 * max(a, b)
    return round(a + (memory - low) * (b - a) / (high - low))
