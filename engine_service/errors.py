"""Every error the engine raises. None of them knows gRPC; `rpc.py` maps classes to status codes."""

from collections.abc import Sequence


class EngineError(Exception):
    """Base of every error the engine raises."""


class InvalidRequestError(EngineError):
    """Raised when a request breaks a rule.

    Attributes:
        field: the field at fault, as the proto names it, such as "sampling.top_p".
        rule: the rule, with the value that breaks it.
    """

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class RequestTooLargeError(InvalidRequestError):
    """Raised when a request could never fit the KV cache, however long it waited.

    Attributes:
        num_pages_needed: pages that prompt and answer take.
        num_pages_usable: pages the pool has, without the sink page.
    """

    def __init__(self, field: str, num_pages_needed: int, num_pages_usable: int) -> None:
        super().__init__(
            field,
            f"prompt and answer take {num_pages_needed} pages of the KV cache, which has {num_pages_usable} "
            "(the engine's num_pages setting)",
        )
        self.num_pages_needed = num_pages_needed
        self.num_pages_usable = num_pages_usable


class QueueFullError(EngineError):
    """Raised when as many requests wait as the queue holds.

    Attributes:
        max_queued_requests: how many the queue holds.
    """

    def __init__(self, max_queued_requests: int) -> None:
        super().__init__(f"{max_queued_requests} requests are waiting, as many as the queue holds; try again later")
        self.max_queued_requests = max_queued_requests


class EngineStoppingError(EngineError):
    """Raised when a request comes while the engine shuts down, or is cut off by it."""

    def __init__(self) -> None:
        super().__init__("the engine is shutting down")


class StepFailedError(EngineError):
    """Raised when a step that a request was part of failed; the engine goes on."""


class CopyTimeoutError(EngineError):
    """Raised when a plan's copy to the device has not been made for so long that it never will be.

    Attributes:
        step_id: the plan's step.
        timeout_seconds: how long it was waited for.
    """

    def __init__(self, step_id: int, timeout_seconds: float) -> None:
        super().__init__(f"the plan of step {step_id} has not been copied to the device in {timeout_seconds:g} s")
        self.step_id = step_id
        self.timeout_seconds = timeout_seconds


class ListenError(EngineError):
    """Raised when the server cannot listen on its address.

    Attributes:
        address: the address.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address


class MissingPackageError(EngineError):
    """Raised when a setting asks for what needs a package that is not installed.

    Attributes:
        setting: the setting.
        package: the package.
    """

    def __init__(self, setting: str, package: str, extra: str) -> None:
        super().__init__(f"{setting} needs the package {package}; install 'ringplan[{extra}]'")
        self.setting = setting
        self.package = package


class ModelError(EngineError):
    """Base of the errors that keep a model from being loaded or run: the engine does not start."""


class NoSuchDeviceError(ModelError):
    """Raised when the device asked for is not there.

    Attributes:
        device: what was asked for.
    """

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"device {device}: {reason}")
        self.device = device


class ModelNotFoundError(ModelError):
    """Raised when there is no model where one was looked for.

    Attributes:
        model: what was asked for.
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model}: {reason}")
        self.model = model


class InvalidModelError(ModelError):
    """Raised when what was found is not a readable model; the message names the file and what is wrong with it.

    Attributes:
        model: what was asked for.
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model}: {reason}")
        self.model = model


class UnsupportedModelError(ModelError):
    """Raised when a model needs something that this engine does not do.

    Attributes:
        model: the model's name or architecture.
        features: what it needs, each by name.
    """

    def __init__(self, model: str, features: Sequence[str]) -> None:
        super().__init__(f"{model} needs what this engine does not do: {'; '.join(features)}")
        self.model = model
        self.features = tuple(features)


class UnsupportedAttentionError(ModelError):
    """Raised when the attention backend that was asked for does not serve a model, or not on this device.

    Attributes:
        model: the model's name.
        backend: the backend.
        features: what it does not do, each by name.
    """

    def __init__(self, model: str, backend: str, features: Sequence[str]) -> None:
        super().__init__(f"attention_backend {backend} does not serve {model}: {'; '.join(features)}")
        self.model = model
        self.backend = backend
        self.features = tuple(features)


class UnsupportedDtypeError(ModelError):
    """Raised when weights cannot be loaded in the data type asked for.

    Attributes:
        dtype: the type asked for.
    """

    def __init__(self, dtype: str, reason: str) -> None:
        super().__init__(f"dtype {dtype}: {reason}")
        self.dtype = dtype


class NotEnoughMemoryError(ModelError):
    """Raised when the KV cache does not fit in memory.

    Attributes:
        num_pages_wanted: pages asked for, or the fewest that are of use.
        num_pages_fit: pages that fit.
        bytes_per_page: what one page takes.
    """

    def __init__(self, num_pages_wanted: int, num_pages_fit: int, bytes_per_page: int, setting: str) -> None:
        super().__init__(
            f"the KV cache needs {num_pages_wanted} pages of {bytes_per_page} bytes and {num_pages_fit} fit in memory; "
            f"change {setting}"
        )
        self.num_pages_wanted = num_pages_wanted
        self.num_pages_fit = num_pages_fit
        self.bytes_per_page = bytes_per_page
