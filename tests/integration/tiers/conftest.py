from tests.integration.pd.conftest import start

__all__ = ["start"]
