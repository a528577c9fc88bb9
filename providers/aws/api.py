"""Client of AWS's API over botocore. Calls run in threads with timeouts, and raise the broker's errors.

botocore's clients are thread-safe, but its sessions are not, so clients are created one at a time and cached. Only
the first call imports botocore, so a daemon without AWS does not need this package.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from providers.common.credentials import aws_environment

T = TypeVar("T")

THREADS = 16
"""Largest number of simultaneous calls."""
CONNECT_S, READ_S, ATTEMPTS = 5.0, 20.0, 2
"""Timeouts in seconds for the connection and for each read, and the largest number of attempts per call."""
POLICY = "give the user or role the policy deploy/iam/aws.json"
LOGIN = "log in again with `aws sso login` or `aws login`, or renew the temporary keys"
CLOCK = "this computer's clock is wrong: set it by NTP"
KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure` or `aws sso login`"

_FORBIDDEN = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "NotAuthorized"}
_WRONG_KEY = {
    "AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException", "InvalidAccessKeyId",
    "MissingAuthenticationToken", "IncompleteSignature",
}  # fmt: skip
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_SKEWED = {"RequestExpired", "RequestTimeTooSkewed", "RequestInTheFuture"}
"""Codes that AWS returns for a wrong clock. AWS returns `RequestExpired` for expired temporary keys too."""
_UNTIMELY = re.compile(r"signature (expired|not yet current)", re.I)
_ACCOUNT = {"OptInRequired", "PendingVerification", "Blocked", "SubscriptionRequiredException"}
_THROTTLED = {
    "RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException",
    "RequestThrottled", "RequestThrottledException", "EC2ThrottledException", "BandwidthLimitExceeded", "SlowDown",
}  # fmt: skip
_SOLD_OUT = {
    "InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity", "UnfulfillableCapacity",
    "InsufficientReservedInstanceCapacity", "SpotMaxPriceTooLow", "InsufficientCapacityOnHost",
}  # fmt: skip
_QUOTA = {
    "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "VolumeLimitExceeded",
    "MaxConfigLimitExceeded", "AddressLimitExceeded",
}  # fmt: skip
_ABSENT = {"InvalidInstanceID.NotFound"}
_SERVERS_FAULT = {"InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable", "ServerInternal"}

_NO_KEYS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "ConfigNotFound",
    "InvalidConfigError", "ConfigParseError",
}  # fmt: skip
_NO_LOGIN = {
    "TokenRetrievalError", "SSOError", "LoginError", "NoAuthTokenError",
}  # fmt: skip
_UNSHARED = ("ec2-credentials-file", "boto")
"""Methods of botocore whose files SkyPilot's server does not get."""
_WRONG_REQUEST = {
    "ParamValidationError",
    "ValidationError",
    "UnknownRegionError",
    "InvalidRegionError",
    "NoRegionError",
}
"""Names of exceptions that botocore raises before it sends a request. Not every version has all of these classes."""


def error_for_code(operation_text: str, code: str, message: str, status: int) -> ProviderError:
    """Return the broker's error for an error code of AWS. `status`: HTTP status."""
    text = f"AWS: {operation_text}: {code}: {' '.join(message.split())[:300]}"
    code = re.sub(r"^(Client|Server)\.", "", code)
    if code in _ABSENT:
        return Gone(text)
    if code in _SOLD_OUT:
        return NoCapacity(text)
    if code in _THROTTLED or status == 429:
        return Throttled(text)
    if code in _SKEWED or _UNTIMELY.search(message):
        return Rejected(f"{text}; {CLOCK}, or {LOGIN}")
    fixes = (
        (_FORBIDDEN, POLICY),
        (_WRONG_KEY, f"AWS does not know the key, the region is not enabled, or {CLOCK}; {KEYS}"),
        (_EXPIRED, LOGIN),
        (_ACCOUNT, "finish the account's registration, or enable the region, in AWS's console"),
        (_QUOTA, "raise the quota in AWS's console under Service Quotas"),
    )
    for codes, fix in fixes:
        if code in codes:
            return Rejected(f"{text}; {fix}")
    if code.isdecimal() and status != 401:
        return OutcomeUnknown(f"{text}; sent by a proxy or a CDN, not by AWS")  # no code of AWS is a number
    if code in _SERVERS_FAULT or not 400 <= status < 500 or status == 408:
        return OutcomeUnknown(text)
    return Rejected(text)


def error_for_exception(operation_text: str, error: Exception) -> ProviderError:
    """Return the broker's error for an exception of botocore."""
    if isinstance(response := getattr(error, "response", None), dict):
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return error_for_code(operation_text, _code(error), str(response.get("Error", {}).get("Message", "")), status)
    kinds = _class_names(error)
    text = f"AWS: {operation_text}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if kinds & _NO_LOGIN:
        return Rejected(f"{text}; {LOGIN}")
    if kinds & _NO_KEYS:
        return Rejected(f"{text}; {KEYS}")
    if kinds & _WRONG_REQUEST:
        return Rejected(text)
    return OutcomeUnknown(text)


def is_credential_error(error: Exception) -> bool:
    """Return True if a login or another key may resolve the error."""
    return _code(error) in _EXPIRED | _WRONG_KEY or bool(_class_names(error) & (_NO_KEYS | _NO_LOGIN))


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _class_names(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


class Aws:
    """Client for calls by service, region and operation, with the names of botocore's models."""

    def __init__(self, endpoint: str | None, *, env: Mapping[str, str], home: Path) -> None:
        """Prepare the client; make no call yet.

        `endpoint`: URL of an emulator of all services; `AWS_ENDPOINT_URL_<SERVICE>` has priority. None: AWS.
        """
        self._endpoint, self._env, self._home = endpoint, aws_environment(env), home
        self.source = ""
        """Source of the latest credentials: botocore's name of the method, and the profile."""
        self._clients: dict[tuple[str, str], Any] = {}
        self._session: Any = None
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aws")

    async def call(self, service: str, region: str, operation: str, **parameters: Any) -> Mapping[str, Any]:
        """Call an operation (in snake case) and return its answer. Raises the broker's ProviderErrors."""

        def ask(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = getattr(client, operation)(**parameters)
            return answer

        return await self._run(service, region, operation, ask)

    async def pages(self, service: str, region: str, operation: str, key: str, **parameters: Any) -> Sequence[Any]:
        """Return all items below `key` of all pages. Raises the errors of `call`."""

        def ask(client: Any) -> Sequence[Any]:
            items: list[Any] = []
            for page in client.get_paginator(operation).paginate(**parameters):
                items += page.get(key, [])
            return items

        return await self._run(service, region, operation, ask)

    async def _run(self, service: str, region: str, operation: str, ask: Callable[[Any], T]) -> T:
        return await self._in_thread(f"{operation} in {region}", lambda: ask(self._client(service, region)))

    async def key_id(self) -> str:
        """Return the id of the current access key.

        An expiring key is renewed first, which may take as long as a call.
        """
        return await self._in_thread("the credentials", self._key_id)

    def _key_id(self) -> str:
        from botocore.exceptions import NoCredentialsError

        with self._lock:
            credentials = self._open_session().get_credentials()
        if credentials is None:
            raise NoCredentialsError
        profile = self._env.get("AWS_PROFILE", "default")
        self.source = "the environment" if credentials.method == "env" else f"{credentials.method}, profile {profile}"
        return str(credentials.get_frozen_credentials().access_key)

    async def _in_thread(self, operation_text: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except ImportError:
            raise Rejected("AWS: botocore is not installed; run `pip install 'gpubroker[aws]'`") from None
        except Exception as e:
            if is_credential_error(e):
                self.forget_credentials()
            raise error_for_exception(operation_text, e) from None

    def _client(self, service: str, region: str) -> Any:
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = self._create_client(service, region)
            return self._clients[service, region]

    def _create_client(self, service: str, region: str) -> Any:
        from botocore.config import Config as BotoConfig

        config = BotoConfig(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
            max_pool_connections=THREADS,
        )
        variable = f"AWS_ENDPOINT_URL_{service.upper().replace('-', '_')}"
        endpoint = self._env.get(variable) or self._endpoint or self._env.get("AWS_ENDPOINT_URL")
        return self._open_session().create_client(service, region_name=region, endpoint_url=endpoint, config=config)

    def _open_session(self) -> Any:
        """Return the session, which finds credentials in `env` and `home` as AWS's command line does."""
        if self._session is None:
            from botocore.configprovider import ConstantProvider
            from botocore.credentials import EnvProvider
            from botocore.session import Session

            session = Session()
            # A profile given to Session would disable the environment, which SkyPilot's sessions read first.
            profile = ConstantProvider(self._env.get("AWS_PROFILE"))
            session.get_component("config_store").set_config_provider("profile", profile)
            files = {
                "credentials_file": ("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"),
                "config_file": ("AWS_CONFIG_FILE", ".aws/config"),
            }
            for setting, (variable, usual) in files.items():
                session.set_config_variable(setting, self._env.get(variable) or str(self._home / usual))
            chain = session.get_component("credential_provider")
            for method in ("env", *_UNSHARED):
                chain.remove(method)
            chain.providers.insert(0, EnvProvider(environ=dict(self._env)))
            if self._env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
                chain.remove("iam-role")
            self._session = session
        return self._session

    def forget_credentials(self) -> None:
        """Drop the session, so that the next call reads the credentials again, e.g. after `aws sso login`."""
        with self._lock:
            self._session = None
            self._clients.clear()

    def regions(self, service: str) -> Sequence[str]:
        """Return the regions that botocore lists; new regions may be missing."""
        with self._lock:
            names: Sequence[str] = self._open_session().get_available_regions(service)
            return names

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
