"""Read the one line by which an error is reported."""

import pytest

from engine.contract import LockstepError


def refused(says, act):
    """Return the one line of the LockstepError that `act` raises; the line has each of the texts `says`."""
    with pytest.raises(LockstepError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900, text
    for words in [says] if isinstance(says, str) else says:
        assert words in text, text
    return text
