import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts without a chat template."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-chat", chat=True)


@pytest.fixture(autouse=True)
def _hear_ctrl_c() -> Iterator[None]:
    """Give SIGINT its usual effect: what starts in the background of a script ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
