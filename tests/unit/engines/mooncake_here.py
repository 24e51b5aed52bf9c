"""Whether Mooncake can be tested on this machine."""

import pytest

from kvferry.engines.mooncake.library import check_installed
from kvferry.errors import EngineUnavailable


def need_mooncake():
    """Skip a test file whose library is not installed; the reason is the install line."""
    try:
        check_installed()
    except EngineUnavailable as error:
        pytest.skip(str(error), allow_module_level=True)
