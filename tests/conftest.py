from collections.abc import Callable, Iterator

import pytest

from headrace.cli.app import _run


@pytest.fixture(autouse=True, scope="session")
def _own_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a user's machine remembers of drives and histories is neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: exit status, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = _run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
