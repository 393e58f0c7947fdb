"""What the answers teach: how an upstream's own counts differ from ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """Ours → theirs: tokens = slope · count + offset, for one upstream and model; a frozen value that travels with a ruler.

    margin: the share of the window to keep free because this may be wrong. samples: how many answers it was learned from.
    """

    slope: float = 1.0
    offset: float = 0.0
    margin: float = 0.0
    samples: int = 0


EXACT = Calibration()
