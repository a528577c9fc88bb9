"""Doctor names the credentials in use, so that a wrong account is seen before money is spent."""

from broker.api.schemas.offers import ProviderView
from broker.cli.operator.doctor import _provider


def test_doctor_names_the_identity_that_it_checked() -> None:
    view = ProviderView(name="aws", offers=3, dropped={}, self_stop="os_shutdown", identity="sso, profile a, account 1")
    assert _provider(view, has_credentials_checked=True).detail == (
        "credentials work (sso, profile a, account 1), 3 offers"
    )
    assert _provider(view, has_credentials_checked=False).detail == "3 offers"
