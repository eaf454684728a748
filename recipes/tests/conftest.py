import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    from tests.cli.target import write_target  # imports jax, which tests/conftest.py configures

    folder = tmp_path_factory.mktemp("targets") / "tiny"
    write_target(folder)
    return folder
