"""The contract of a writer."""

import pytest

from trainwright import EventStorage, Writer


def test_a_writer_without_a_write_says_what_to_override():
    class Silent(Writer):
        pass

    with pytest.raises(NotImplementedError, match=r"Silent must override write\(storage\)"):
        Silent().write(EventStorage())
    Silent().close()
