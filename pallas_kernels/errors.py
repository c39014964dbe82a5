"""The error that says an implementation cannot do what was asked."""


class UnsupportedError(NotImplementedError):
    """The named implementation cannot serve this call; the message says why and what can."""
